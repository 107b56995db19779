"""A compiled Keras model's own steps, as functrain steps over a state of pytrees."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.state._keras_state import KerasState, Variables, require_compiled
from bridge.train._carried import carried
from functrain.internal import PyTree, StepTraits, add_notes
from functrain.internal import tree as _tree


def train_step(model: keras.Model) -> "KerasStep":
    """Returns the model's own `train_step`, overridden or not, as a functrain step.

    Args:
      model: A compiled model.

    Returns:
      ``step(state: KerasState, batch) -> (state, logs)``: pure, not jitted, for `functrain.fuse`,
      `functrain.run`, `jax.jit`, `jax.vmap`. Logs are what the model's step reports: running
      values of its metrics, which `state.metrics` carries.

    Raises:
      TypeError: `model` is no keras.Model.
      ValueError: `model` is not compiled.

    Examples:
      >>> import bridge, functrain as ft, keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> batches = np.ones((5, 4, 3), np.float32), np.ones((5, 4, 1), np.float32)
      >>> state = bridge.keras_state(model, (batches[0][0], batches[1][0]))
      >>> state, logs = ft.fuse(train_step(model), 5)(state, batches)
      >>> logs["loss"].shape
      (5,)
    """
    require_compiled(model)
    return KerasStep(model, trains=True)


def test_step(model: keras.Model) -> "KerasStep":
    """Returns the model's own `test_step`, overridden or not, as a functrain step.

    As `train_step`; the optimizer's variables come back as they were.

    Examples:
      >>> import bridge, jax, keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> batch = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
      >>> state, logs = jax.jit(test_step(model))(bridge.keras_state(model, batch), batch)
      >>> sorted(logs)
      ['loss']
    """
    require_compiled(model)
    return KerasStep(model, trains=False)


class KerasStep(StepTraits):
    """What `train_step` and `test_step` return."""

    stays_compiled = True

    def __init__(self, model: keras.Model, *, trains: bool) -> None:
        self.model = model
        self.trains = trains

    def __call__(self, state: KerasState, batch: PyTree, /) -> tuple[KerasState, PyTree]:
        """Takes one step."""
        if not isinstance(state, KerasState):
            raise TypeError(
                f"state: expected a KerasState, from bridge.keras_state(model), got "
                f"{type(state).__name__}. For a TrainState use functrain.train_step."
            )
        _refuse_stateful_rnns(self.model)
        before = len(self.model.variables)
        old = (state.trainable, state.non_trainable, state.optimizer, state.metrics)
        with noted(self.model, batch), carried(self.model, state.metrics) as merge:
            if self.trains:
                logs, (trainable, rest, optimizer, metrics) = self.model.train_step(old, batch)
            else:
                tested = (state.trainable, state.non_trainable, state.metrics)
                logs, (trainable, rest, metrics) = self.model.test_step(tested, batch)
                optimizer = state.optimizer
            rest, metrics = merge(rest, metrics)
        _refuse_new_variables(self.model, before)
        new = (trainable, rest, optimizer, metrics)
        return KerasState(*map(_as_before, old, new)), logs


class PredictStep(StepTraits):
    """A model's own `predict_step` as a functrain step."""

    stays_compiled = True

    def __init__(self, model: keras.Model) -> None:
        self.model = model

    def __call__(self, state: KerasState, batch: PyTree, /) -> tuple[KerasState, PyTree]:
        """Takes one step."""
        with noted(self.model, batch):
            outputs, rest = self.model.predict_step((state.trainable, state.non_trainable), batch)
        return state.replace(non_trainable=_as_before(state.non_trainable, rest)), outputs


@contextlib.contextmanager
def noted(model: keras.Model, data: PyTree) -> Iterator[None]:
    """Context manager: adds to an exception what the data were, and what the model takes.

    Args:
      model: The model.
      data: A batch, or all data: x, (x, y) or (x, y, sample_weight).
    """
    takes = _input_spec(model) if model.built else ""  # a build that fails notes what it was given
    try:
        yield
    except Exception as error:
        known = f"; the model {model.name!r} takes {takes}" if takes else ""
        add_notes(error, described(data) + known)
        raise


def described(data: PyTree) -> str:
    """Returns the dtypes and shapes of x, y and sample_weight, or of another batch's leaves."""
    try:
        values = keras.utils.unpack_x_y_sample_weight(data)
    except ValueError:  # a batch such as (a, b, c, d), which a train_step of the user's unpacks
        return "batch " + ", ".join(map(_tree.spec, jax.tree.leaves(data)))
    parts = zip(("x", "y", "sample_weight"), values, strict=True)
    specs = [(name, ", ".join(map(_tree.spec, jax.tree.leaves(part)))) for name, part in parts]
    return ", ".join(f"{name} {spec or 'None'}" for name, spec in specs[: 3 if specs[2][1] else 2])


def _input_spec(model: keras.Model) -> str:
    """Returns the inputs that a model was made or built for; "" if it does not know."""
    try:
        inputs = keras.tree.flatten(model.inputs)
        return ", ".join(f"{x.dtype}[{', '.join(map(str, x.shape))}]" for x in inputs)
    except (AttributeError, ValueError):  # a subclass, which knows shapes only
        built: dict[str, Any] = getattr(model, "get_build_config", dict)() or {}
        return f"inputs of shape {built['input_shape']}" if "input_shape" in built else ""


def _as_before(old: Variables, new: Variables) -> Variables:
    """Gives values the dtypes they had, as a variable does when it is assigned to."""
    return [jnp.asarray(x, dtype=v.dtype) for v, x in zip(old, new, strict=True)]


def _refuse_new_variables(model: keras.Model, before: int) -> None:
    made = [v.path for v in model.variables[before:]]
    if made:
        raise ValueError(
            f"model: expected {model.name!r} to have all its variables before a step, got one that "
            f"made {', '.join(made)} in it: a layer is called for the first time where "
            "training=True. Call the model once on a batch, model(x, training=True), and compile "
            "it again."
        )


def _refuse_stateful_rnns(model: keras.Model) -> None:
    for layer in keras_private.layers.all_layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"layer {layer.name!r}: expected stateful=False, got stateful=True. Its states are "
                "in no list of variables, and would be lost from step to step, as they are in "
                "model.fit. Pass them (return_state=True, initial_state=...)."
            )
