"""The data that tasks of keras_hub prepare in their own fit, evaluate and predict."""

import inspect
from types import SimpleNamespace
from typing import Any

import keras


class _Arguments(SimpleNamespace):
    """The arguments of Keras's `fit`, `evaluate` or `predict`, by name."""


class _ReturnsArguments(keras.Model):  # type: ignore[misc]  # keras has no types
    """A model whose `fit`, `evaluate` and `predict` return their arguments."""

    def fit(self, *args: Any, **kwargs: Any) -> _Arguments:
        return _bind(keras.Model.fit, args, kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> _Arguments:
        return _bind(keras.Model.evaluate, args, kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> _Arguments:
        return _bind(keras.Model.predict, args, kwargs)


class _StandIn:
    """Has the attributes of a model, while `super()` in a method takes it for one of `cls`."""

    def __init__(self, model: keras.Model, cls: type) -> None:
        self._model, self._class = model, cls

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._class

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def preparing_class(model: Any) -> type | None:
    """Returns the class whose own `fit` prepares the data of a model; None for most models.

    For tasks of keras_hub this is `PipelineModel`, whose methods make a dataset of the data, map
    `preprocess_samples` over it, and pass it on to Keras's methods.
    """
    methods = {"preprocess_samples", "fit"}
    return next((cls for cls in type(model).__mro__ if methods <= vars(cls).keys()), None)


def prepared(model: keras.Model, method: str, **arguments: Any) -> Any:
    """Returns the arguments that a model's `fit`, `evaluate` or `predict` passes on to Keras's.

    Calls the method that prepares the data, with a stand-in for the model. The method's call of
    `super()` finds a method that returns its arguments. Relies on `PipelineModel` ending with
    ``return super().fit(...)``; checked with keras_hub 0.32.0. Without it the conversion of data
    would have to be copied for each release of keras_hub.

    Args:
      model: The model.
      method: "fit", "evaluate" or "predict".
      **arguments: The arguments for it. Most models take them as they are.

    Raises:
      TypeError: The method returns something else.
    """
    cls = preparing_class(model)
    if cls is None:
        return _Arguments(**arguments)
    # In the order of its bases, the methods of `cls` come before those that return arguments.
    recorder = type(cls.__name__, (cls, _ReturnsArguments), {})
    passed_on = getattr(recorder, method)(_StandIn(model, recorder), **arguments)
    if type(passed_on) is not _Arguments:
        raise TypeError(
            f"model: expected {cls.__name__}.{method} to end with `return super().{method}(...)`, "
            f"got {type(passed_on).__name__}. Prepare the data first, and pass a model of another "
            f"class, such as keras.Model(model.inputs, model.outputs)."
        )
    return passed_on


def _bind(function: Any, args: Any, kwargs: Any) -> _Arguments:
    """Returns the arguments of a call of a method by name, with the defaults of those left out."""
    bound = inspect.signature(function).bind(None, *args, **kwargs)
    bound.apply_defaults()
    return _Arguments(**bound.arguments)
