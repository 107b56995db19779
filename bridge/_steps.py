"""A compiled Keras model's own steps, as functrain steps over a state of pytrees."""

from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import keras

from bridge import _keras_private
from bridge._carried import carried
from functrain import _tree

PyTree: TypeAlias = Any
Variables: TypeAlias = list[Any]
Layouts: TypeAlias = dict[str, list[jax.sharding.Sharding]]


class KerasState(flax.struct.PyTreeNode):
    """Keras's own state of a compiled model: its four lists of variables, as arrays.

    Attributes:
      trainable: Values of `model.trainable_variables`.
      non_trainable: Values of `model.non_trainable_variables`, seed counters included.
      optimizer: Values of `model.optimizer.variables`.
      metrics: Values of `model.metrics_variables`.

    Examples:
      >>> state = KerasState(trainable=[jnp.ones(3)], non_trainable=[], optimizer=[], metrics=[])
      >>> jax.tree.map(jnp.shape, state).trainable
      [(3,)]
    """

    trainable: list[jax.Array]
    non_trainable: list[jax.Array]
    optimizer: list[jax.Array]
    metrics: list[jax.Array]


def keras_state(model: keras.Model, batch: PyTree = None) -> KerasState:
    """Returns copies of all variables of a compiled model, as they are now.

    Args:
      model: A compiled model.
      batch: One batch as `fit` would make it: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
        Needed before the first `fit`, since Keras builds compiled losses and metrics, and a model
        that was not built, when it sees one.

    Returns:
      The state for `train_step` and `test_step`. The model stays alive when it is consumed.

    Raises:
      TypeError: `model` is no keras.Model.
      ValueError: `model` is not compiled, or has something that is not built and no `batch` came.

    Examples:
      >>> import keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
      >>> model.compile("adam", "mse")
      >>> state = keras_state(model, (np.ones((4, 3)), np.ones((4, 1))))
      >>> [len(variables) for variables in (state.trainable, state.optimizer)]
      [2, 6]
    """
    _require_compiled(model)
    if batch is not None:
        _keras_private.build(model, batch)
    elif not _keras_private.is_built(model):
        raise ValueError(
            f"model: expected {model.name!r} to be built with its compiled loss and metrics, which "
            "Keras does at the first batch. Pass one: bridge.keras_state(model, batch=(x, y))."
        )
    lists = _lists(model).values()
    return KerasState(*_tree.copy([[v.value for v in variables] for variables in lists]))


def write_keras_state(state: KerasState, model: keras.Model) -> keras.Model:
    """Copies a state into the variables of its model: all of them, or none if one does not fit."""
    _require_compiled(model)
    lists, got = _lists(model), {name: getattr(state, name) for name in _lists(model)}
    for path, leaf in _tree.leaves_with_path(got):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{path}: expected an array with a value, got a tracer, {_tree.spec(leaf)}. "
                "Return the state from the traced function and call bridge.to_keras outside."
            )
    want = {name: [v.value for v in variables] for name, variables in lists.items()}
    wrong = _tree.spec_differences(_specs(want), _specs(got))
    if wrong:
        raise ValueError(
            f"state: expected one of the compiled model {model.name!r}, got\n"
            f"{_tree.bullets(wrong)}\n"
            "Freezing layers and compiling anew change the lists: take a new one from "
            "bridge.keras_state(model). The model is unchanged."
        )
    copies = _tree.copy(got)
    for name, variables in lists.items():
        for variable, value in zip(variables, copies[name], strict=True):
            variable.assign(value)
    return model


def _lists(model: keras.Model) -> dict[str, Variables]:
    """Returns Keras's four lists of variables, in the order of KerasState."""
    return {
        "trainable": model.trainable_variables,
        "non_trainable": model.non_trainable_variables,
        "optimizer": getattr(getattr(model, "optimizer", None), "variables", []),
        "metrics": model.metrics_variables,
    }


def _specs(tree: PyTree) -> dict[str, str]:
    return {
        path: f"{x.dtype}[{', '.join(map(str, x.shape))}]"
        for path, x in _tree.leaves_with_path(tree)
    }


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
      >>> import functrain as ft, keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> batches = np.ones((5, 4, 3), np.float32), np.ones((5, 4, 1), np.float32)
      >>> state = keras_state(model, (batches[0][0], batches[1][0]))
      >>> state, logs = ft.fuse(train_step(model), 5)(state, batches)
      >>> logs["loss"].shape
      (5,)
    """
    _require_compiled(model)
    return KerasStep(model, trains=True)


def test_step(model: keras.Model) -> "KerasStep":
    """Returns the model's own `test_step`, overridden or not, as a functrain step.

    As `train_step`; the optimizer's variables come back as they were.

    Examples:
      >>> import keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> batch = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)
      >>> state, logs = jax.jit(test_step(model))(keras_state(model, batch), batch)
      >>> sorted(logs)
      ['loss']
    """
    _require_compiled(model)
    return KerasStep(model, trains=False)


class KerasStep:
    """What `train_step` and `test_step` return."""

    def __init__(self, model: keras.Model, *, trains: bool) -> None:
        self.model = model
        self.trains = trains
        self.layouts: Layouts | None = None  # where a model has no values, as while it is fitted

    def __call__(self, state: KerasState, batch: PyTree, /) -> tuple[KerasState, PyTree]:
        """Takes one step."""
        if not isinstance(state, KerasState):
            raise TypeError(
                f"state: expected a KerasState, from bridge.keras_state(model), got "
                f"{type(state).__name__}. For a TrainState use functrain.train_step."
            )
        _refuse_stateful(self.model)
        old = (state.trainable, state.non_trainable, state.optimizer, state.metrics)
        with carried(self.model, state.metrics) as merge:
            logs, (trainable, rest, optimizer, metrics) = self._step(old, batch)
            rest, metrics = merge(rest, metrics)
        new = (trainable, rest, optimizer, metrics)
        distributed = keras.distribution.distribution() is not None
        where = (self.layouts or layouts(self.model)) if distributed else None
        return pinned(KerasState(*map(_as_before, old, new)), where), logs

    def _step(self, old: tuple[Variables, ...], batch: PyTree) -> tuple[PyTree, Any]:
        if self.trains:
            logs, new = self.model.train_step(old, batch)
            return logs, new
        trainable, non_trainable, optimizer, metrics = old
        logs, rest = self.model.test_step((trainable, non_trainable, metrics), batch)
        return logs, (rest[0], rest[1], optimizer, rest[2])


def layouts(model: keras.Model) -> Layouts:
    """Returns where the variables of a model are."""
    return {name: [v.value.sharding for v in found] for name, found in _lists(model).items()}


def pinned(state: KerasState, where: Layouts | None) -> KerasState:
    """Keeps variables where `keras.distribution` put them.

    Left to itself the compiler chooses the layout of what a loop carries: biases were seen to
    drift from replicated to sharded.
    """
    if where is None:
        return state
    pins = {
        name: list(map(jax.lax.with_sharding_constraint, values, where[name]))
        for name in where
        if (values := getattr(state, name))
    }
    return state.replace(**pins)


def _as_before(old: Variables, new: Variables) -> Variables:
    """Gives values the dtypes they had, as a variable does when it is assigned to."""
    return [jnp.asarray(x, dtype=v.dtype) for v, x in zip(old, new, strict=True)]


def _refuse_stateful(layer: keras.Layer) -> None:
    if isinstance(layer, keras.layers.RNN) and layer.stateful:
        raise ValueError(
            f"layer {layer.name!r}: expected stateful=False, got stateful=True. Its states are in "
            "no list of variables, and would be lost from step to step, as they are in model.fit. "
            "Pass them (return_state=True, initial_state=...)."
        )
    for below in _keras_private.sublayers(layer):
        _refuse_stateful(below)


def _require_compiled(model: Any) -> None:
    if not _keras_private.is_trainer(model):
        raise TypeError(f"model: expected a keras.Model, got {type(model).__name__}")
    if not model.compiled:
        raise ValueError(
            f"model: expected {model.name!r} to be compiled. Call model.compile(optimizer=..., "
            "loss=...) first; or, without compiling, use bridge.from_keras with a loss and an "
            "optimizer of your own."
        )
