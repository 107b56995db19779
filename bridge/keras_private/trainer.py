"""A model as its own fit uses it: arguments, compiled parts, metrics, and values in training."""

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import keras
import numpy as np
from keras.src.utils.python_utils import pythonify_logs

from bridge.keras_private.layers import all_layers
from bridge.keras_private.optimizers import atomic_build
from functrain.internal import error_notes


def is_trainer(model: Any) -> bool:
    """Returns True if an object has Keras's train_step, fit and so on, as a keras.Model has.

    Reads the first base of `keras.Model`, which is `JAXTrainer` in Keras 3.15.1 and `Trainer` in
    3.16. A layer with a trainer mixed in is not a keras.Model, but Keras accepts it as one.
    """
    return isinstance(model, keras.Model.__bases__[0])


def build(model: keras.Model, batch: Any = None, iterator: Any = None) -> None:
    """Builds a model and its compiled loss, metrics and optimizer.

    Calls `Trainer._symbolic_build`; checked with Keras 3.15.1. Without it compiled metrics have
    no variables before the first `fit`, and a state made before that lacks them.

    Args:
      model: A compiled model.
      batch: A batch like those that it will be trained on.
      iterator: Keras's EpochIterator, asked for a batch only if more than the optimizer is not
        built.
    """
    # A model that was never compiled may lack the attribute.
    with atomic_build(getattr(model, "optimizer", None)):
        model._symbolic_build(iterator=iterator, data_batch=jax.tree.map(_with_dtype_of_jax, batch))


def _with_dtype_of_jax(x: Any) -> Any:
    """Returns an array in the dtype that jax gives it. From 0.12 on, jax warns of 64 bits."""
    is_number = isinstance(x, np.ndarray) and x.dtype.kind in "iuf"
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False) if is_number else x


@contextlib.contextmanager
def target_notes(*, has_targets: bool) -> Iterator[None]:
    """Context manager: tells of missing targets, which errors do not name. Public names only."""
    try:
        yield
    except Exception as error:
        if not has_targets:
            error.add_note(
                "y: the data have no targets, which most losses need. A list in x has an array "
                "for each input of the model; batches (x, y) come from a generator or a dataset."
            )
        raise


def build_from(model: keras.Model, epochs: Any) -> None:
    """Builds what is not built for the first batch of `epochs`, and resets them to their start."""

    def of_jax(item: Any) -> Any:
        return jax.tree.map(_with_dtype_of_jax, epochs.batch_of(item))

    try:
        if not (is_built(model) and all(layer.built for layer in all_layers(model))):
            # Keras needs arrays for their shapes, and rows of arrays have not been taken yet.
            batches = ((begin, end, map(of_jax, items)) for begin, end, items in epochs)
            x, y, _ = epochs.given
            # Targets may be in a dataset or generator.
            has_targets = y is not None or not isinstance(x, np.ndarray | jax.Array | list | dict)
            with error_notes(epochs.given, "data"), target_notes(has_targets=has_targets):
                build(model, iterator=batches)
        epochs.reset()
    finally:
        # The data may have called a loop of Keras's that failed.
        reattach(model)


def is_built(model: keras.Model) -> bool:
    """Returns True if the first batch of a compiled model has nothing left to build.

    Reads `Trainer._compile_metrics` and `Trainer._compile_loss`; checked with Keras 3.15.1.
    Without it a state with missing metrics cannot be told from a complete one.
    """
    parts = (model, model._compile_metrics, model._compile_loss, model.optimizer)
    return all(part is None or part.built for part in parts)


def owner_of_step(model: keras.Model, kind: str) -> Any:
    """Returns the function in which Keras keeps a compiled step, which lives as long as the step.

    Reads `train_function`, `test_function` or `predict_function` after it called the method that
    makes it; of a class with its own such method, reads `Trainer._loss_tracker`. Checked with Keras
    3.15.1. `compile` replaces both, and `make_train_function(force=True)` the function. Without it
    a step compiled before would run after them.
    """
    make = f"make_{kind}_function"
    if getattr(type(model), make) is not getattr(keras.Model, make, None):
        return model._loss_tracker or model
    getattr(model, make)()
    return getattr(model, f"{kind}_function")


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that BackupAndRestore has restored, which overrides `initial_epoch`.

    Reads `Trainer._initial_epoch`; checked with Keras 3.15.1.
    """
    epoch: int | None = model._initial_epoch
    return epoch


def epoch_logs(model: keras.Model, logs: Any) -> Any:
    """Returns the model's metrics, or `logs` itself if a step reports values of other names.

    Calls `Trainer._get_metrics_result_or_logs`; checked with Keras 3.15.1. Without it History
    lacks the values that Keras writes if a model has its own `train_step` or `metrics`.
    """
    return model._get_metrics_result_or_logs(logs)


def as_floats(logs: Any) -> dict[str, Any]:
    """Returns logs as callbacks get them: flat, sorted by name, and scalars as floats.

    Calls `pythonify_logs`; checked with Keras 3.15.1. Without it callbacks get arrays.
    """
    return dict(pythonify_logs(logs))


def metrics_in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as the list, or the scalar, that `evaluate` returns.

    Calls `Trainer._flatten_metrics_in_order`; checked with Keras 3.15.1.
    """
    return model._flatten_metrics_in_order(logs)


def reattach(model: keras.Model) -> None:
    """Gives a model the values that a loop of Keras's has left beside it.

    Reads and sets `JAXTrainer._jax_state` and `_jax_state_synced`, and calls `jax_state_sync`;
    checked with Keras 3.15.1. Without it a model whose `predict` or `evaluate` was interrupted has
    no values, and those of an earlier `train_on_batch` come back after one that has failed.
    """
    lists = getattr(model, "_jax_state", None)
    is_needed = any(v._value is None for v in model.variables)
    if lists and is_needed and not any(x.is_deleted() for x in keras.tree.flatten(lists)):
        model.jax_state_sync()
    # Setting the attributes through Keras's __setattr__ would track every list.
    vars(model).update(_jax_state=None, _jax_state_synced=True)


def forget_losses(model: keras.Layer) -> None:
    """Drops the losses that a failed `fit` left behind.

    Clears `Layer._losses_override`; checked with Keras 3.15.1, which fills it during a train step
    and empties it only if the step succeeds. Without it `layer.losses` returns dead tracers
    of that step in place of this call's losses.
    """
    model._losses_override.clear()


class _Arguments(SimpleNamespace):
    """The arguments of Keras's `fit`, `evaluate` or `predict`, by name."""


def _returning(method: str) -> Any:
    """Returns a method that returns its arguments, with Keras's defaults of those left out."""
    signature = inspect.signature(getattr(keras.Model, method))

    def return_arguments(*args: Any, **kwargs: Any) -> _Arguments:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _Arguments(**bound.arguments)

    return return_arguments


class _ReturnsArguments(keras.Model):  # type: ignore[misc]  # keras has no types
    """A model whose `fit`, `evaluate` and `predict` return their arguments."""

    fit, evaluate, predict = map(_returning, ("fit", "evaluate", "predict"))


def preparing_class(model: Any) -> type | None:
    """Returns the class whose own `fit` prepares the data of a model; None for most models.

    For tasks of keras_hub this is `PipelineModel`, whose methods make a dataset of the data, map
    `preprocess_samples` over it, and pass it on to Keras's methods.
    """
    methods = {"preprocess_samples", "fit"}
    return next((cls for cls in type(model).__mro__ if methods <= vars(cls).keys()), None)


def prepared(model: keras.Model, method: str, **arguments: Any) -> Any:
    """Returns the arguments that a model's `fit`, `evaluate` or `predict` passes on to Keras's.

    Calls the method that prepares the data, with a stand-in for the model that has its attributes.
    The method's call of `super()` finds a method that returns its arguments. Relies on
    `PipelineModel` ending with ``return super().fit(...)``; checked with keras_hub 0.32.0. Without
    it the conversion of data would have to be copied for each release of keras_hub.

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
    stand_in: Any = object.__new__(type(cls.__name__, (type(model), _ReturnsArguments), {}))
    vars(stand_in).update(vars(model))
    function = vars(cls).get(method, vars(_ReturnsArguments)[method])
    passed_on = function(stand_in, **arguments)
    if type(passed_on) is not _Arguments:
        raise TypeError(
            f"model: expected {cls.__name__}.{method} to end with `return super().{method}(...)`, "
            f"got {type(passed_on).__name__}. Prepare the data first, and pass a model of another "
            f"class, such as keras.Model(model.inputs, model.outputs)."
        )
    return passed_on
