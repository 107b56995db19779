"""A compiled Keras model's own steps, as functrain steps over a state of pytrees."""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.state._keras_state import KerasState, Variables, require_compiled
from bridge.train._carried import carry_metrics
from functrain import Step
from functrain.internal import PyTree, StepTraits, add_notes, jit, require_instance
from functrain.internal import tree as _tree


def train_step(model: keras.Model) -> Step[KerasState]:
    """Returns the model's own `train_step`, overridden or not, as a functrain step.

    Args:
      model: A compiled model.

    Returns:
      ``step(state: KerasState, batch) -> (state, logs)``: pure, not jitted, for `functrain.fuse`,
      `functrain.run`, `jax.jit`, `jax.vmap`. Logs are the values that the model's step reports:
      running values of its metrics, which `state.metrics` carries.

    Raises:
      TypeError: `model` is not a keras.Model.
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
    return KerasStep(model, "train")


def test_step(model: keras.Model) -> Step[KerasState]:
    """Returns the model's own `test_step`, overridden or not, as a functrain step.

    It is used as `train_step` is, and leaves the optimizer's variables unchanged.

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
    return KerasStep(model, "test")


class KerasStep(StepTraits):
    """One of a model's own steps as a functrain step.

    Args:
      model: The model; compiled, unless the step predicts.
      kind: "train", "test" or "predict".
    """

    # Keras functions that are jitted stay compiled if the step runs operation by operation.
    stays_compiled = True

    def __init__(self, model: keras.Model, kind: str) -> None:
        self.model = model
        self.kind = kind
        # Traced once for each shape of a batch, as in Keras: `output_shapes` and all programs share
        # the trace.
        self._traced_predict = jit(self._predict, inline=True)

    def __call__(self, state: KerasState, batch: PyTree, /) -> tuple[KerasState, PyTree]:
        """Takes one step; returns the new state, and the logs or outputs."""
        expected = "a KerasState, from bridge.keras_state(model)"
        advice = "For a TrainState use functrain.train_step."
        require_instance("state", state, KerasState, expected, advice)
        if self.kind == "predict":
            leaves = jax.tree.leaves((state, batch))
            is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
            with note_data(self.model, batch):
                return (self._traced_predict if is_traced else self._predict)(state, batch)
        require_stateless_rnns(self.model)
        # A layer that is first called inside the trace makes its variables there.
        variables_before = len(self.model.variables)
        with note_data(self.model, batch), _note_missing_value():
            state, logs = self._train_or_test(state, batch)
        _require_no_new_variables(self.model, variables_before)
        return state, logs

    def output_shapes(self, state: KerasState, batch: PyTree) -> PyTree:
        """Returns the shapes of the outputs for a batch, given the shapes of a state."""
        with note_data(self.model, batch):
            return self._traced_predict.eval_shape(state, batch)[1]

    def _train_or_test(self, state: KerasState, batch: PyTree) -> tuple[KerasState, PyTree]:
        # Keras's order of the four lists; its steps return logs first, and the state after them.
        old = (state.trainable, state.non_trainable, state.optimizer, state.metrics)
        with carry_metrics(self.model, state.metrics) as merge:
            if self.kind == "train":
                logs, new = self.model.train_step(old, batch)
                trainable, non_trainable, optimizer, metrics = new
            else:
                tested = (state.trainable, state.non_trainable, state.metrics)
                logs, (trainable, non_trainable, metrics) = self.model.test_step(tested, batch)
                optimizer = state.optimizer
            non_trainable, metrics = merge(non_trainable, metrics)
        method = f"{type(self.model).__name__}.{self.kind}_step"
        expected = "a dict of logs, such as {'loss': loss}, as in Keras's own fit"
        require_instance(method, logs, dict, expected)
        new = (trainable, non_trainable, optimizer, metrics)
        return KerasState(*map(_cast_like, old, new)), logs

    def _predict(self, state: KerasState, batch: PyTree) -> tuple[KerasState, PyTree]:
        values = (state.trainable, state.non_trainable)
        outputs, non_trainable = self.model.predict_step(values, batch)
        return state.replace(non_trainable=_cast_like(state.non_trainable, non_trainable)), outputs


@contextlib.contextmanager
def _note_missing_value() -> Iterator[None]:
    """Context manager: adds to the error of a variable without a value which one it is, and why.

    Keras says "'NoneType' object is not callable".
    """
    try:
        yield
    except TypeError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        variable = frames[-1].f_locals.get("self")
        if isinstance(variable, keras.Variable) and frames[-1].f_code.co_name == "value":
            error.add_note(
                f"The step reads {variable.path} outside of its state, as a metric that returns "
                "the learning rate does. While steps run, variables have no values, as in Keras's "
                "own fit. Read it in a callback instead.",
            )
        raise


@contextlib.contextmanager
def note_data(model: keras.Model, data: PyTree) -> Iterator[None]:
    """Context manager: adds to an exception the shapes of the data, and of the model's inputs.

    Args:
      model: The model.
      data: A batch, or all data: x, (x, y) or (x, y, sample_weight).
    """
    # A failing build leaves the wrong input shapes in the model, so they are read before it.
    inputs = _input_spec(model) if model.built else ""
    try:
        yield
    except Exception as error:
        model_note = f"; the model {model.name!r} takes {inputs}" if inputs else ""
        add_notes(error, describe_batch(data) + model_note)
        raise


def describe_batch(data: PyTree) -> str:
    """Returns the dtypes and shapes of x, y and sample_weight, or of another batch's leaves."""
    try:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    except ValueError:
        # A user's train_step may unpack other batches, such as (a, b, c, d).
        return f"batch {_specs(data)}"
    text = f"x {_specs(x) or 'None'}, y {_specs(y) or 'None'}"
    weight_specs = _specs(sample_weight)
    return f"{text}, sample_weight {weight_specs}" if weight_specs else text


def _specs(tree: PyTree) -> str:
    return ", ".join(map(_tree.spec, jax.tree.leaves(tree)))


def _input_spec(model: keras.Model) -> str:
    """Returns the inputs that a model was made or built for; "" if they are unknown."""
    try:
        inputs = keras.tree.flatten(model.inputs)
        return ", ".join(map(_tree.strong_spec, inputs))
    except (AttributeError, ValueError):
        # A subclass of keras.Model knows only the shape that it was built for.
        config: dict[str, Any] = getattr(model, "get_build_config", dict)() or {}
        return f"inputs of shape {config['input_shape']}" if "input_shape" in config else ""


def _cast_like(old: Variables, new: Variables) -> Variables:
    """Returns new values in the dtypes of the old ones, as assigning to a variable casts them."""
    return [jnp.asarray(x, dtype=v.dtype) for v, x in zip(old, new, strict=True)]


def _require_no_new_variables(model: keras.Model, count: int) -> None:
    """Raises ValueError if a step has made variables: the state has no place for them."""
    paths = [variable.path for variable in model.variables[count:]]
    if paths:
        raise ValueError(
            f"model: expected {model.name!r} to have all its variables before a step, got a step "
            f"that made {', '.join(paths)}: a layer is called for the first time where "
            "training=True. Call the model once on a batch, model(x, training=True), and compile "
            "it again."
        )


def require_stateless_rnns(model: keras.Model) -> None:
    """Raises ValueError for a stateful RNN, whose states are in none of the model's lists."""
    for layer in keras_private.layers.all_layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"layer {layer.name!r}: expected stateful=False, got stateful=True. Its states are "
                "in no list of variables, and would be lost from step to step, as they are in "
                "model.fit. Pass them (return_state=True, initial_state=...)."
            )
