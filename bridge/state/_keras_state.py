"""Keras's own state of a compiled model, as arrays."""

import itertools
from collections.abc import Collection
from typing import Any, TypeAlias

import flax.struct
import jax
import keras

from bridge import keras_private
from bridge.model import _variables
from functrain.internal import PyTree, call
from functrain.internal import tree as _tree

Variables: TypeAlias = list[Any]
FIELDS = ("trainable", "non_trainable", "optimizer", "metrics")


class KerasState(flax.struct.PyTreeNode):
    """Keras's own state of a compiled model: its four lists of variables, as arrays.

    Attributes:
      trainable: Values of `model.trainable_variables`.
      non_trainable: Values of `model.non_trainable_variables`, seed counters included.
      optimizer: Values of `model.optimizer.variables`.
      metrics: Values of `model.metrics_variables`.

    Examples:
      >>> import jax.numpy as jnp
      >>> state = KerasState(trainable=[jnp.ones(3)], non_trainable=[], optimizer=[], metrics=[])
      >>> jax.tree.map(jnp.shape, state).trainable
      [(3,)]
    """

    trainable: list[jax.Array]
    non_trainable: list[jax.Array]
    optimizer: list[jax.Array]
    metrics: list[jax.Array]

    def __repr__(self) -> str:
        return call(self, **{name: getattr(self, name) for name in self.__dataclass_fields__})


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
    require_compiled(model)
    if batch is not None:
        keras_private.trainer.build(model, batch)
    elif not keras_private.trainer.is_built(model):
        raise ValueError(
            f"model: expected {model.name!r} to be built with its compiled loss and metrics, which "
            "Keras does at the first batch. Pass one: bridge.keras_state(model, batch=(x, y))."
        )
    state: KerasState = _tree.copy(originals(model))
    return state


def write_keras_state(state: KerasState, model: keras.Model) -> keras.Model:
    """Copies a state into the variables of its model: all of them, or none if one does not fit."""
    require_compiled(model)
    _variables.require_values(state)
    wrong = _tree.spec_differences(_specs(originals(model)), _specs(state))
    if wrong:
        raise ValueError(
            f"state: expected one of the compiled model {model.name!r}, got\n"
            f"{_tree.bullets(wrong)}\n"
            "Freezing layers and compiling anew change the lists: take a new one from "
            "bridge.keras_state(model). The model is unchanged."
        )
    lists = variable_lists(model).items()
    pairs = [zip(variables, getattr(state, name), strict=True) for name, variables in lists]
    _variables.write(list(itertools.chain(*pairs)))
    return model


def variable_lists(model: keras.Model) -> dict[str, Variables]:
    """Returns Keras's four lists of variables, in the order of KerasState."""
    return {
        "trainable": model.trainable_variables,
        "non_trainable": model.non_trainable_variables,
        "optimizer": getattr(getattr(model, "optimizer", None), "variables", []),
        "metrics": model.metrics_variables,
    }


def originals(model: keras.Model, fields: Collection[str] = FIELDS) -> KerasState:
    """Returns the values that a model's variables have, not copies; of some lists if asked."""
    lists = variable_lists(model).items()
    return KerasState(**{n: [v.value for v in found] if n in fields else [] for n, found in lists})


def _specs(tree: PyTree) -> dict[str, str]:
    return {path: _tree.strong_spec(x) for path, x in _tree.leaves_with_path(tree)}


def require_compiled(model: Any) -> None:
    """Refuses what is no Keras model, or was not compiled."""
    if not keras_private.trainer.is_trainer(model):
        raise TypeError(f"model: expected a keras.Model, got {type(model).__name__}")
    if not model.compiled:
        raise ValueError(
            f"model: expected {model.name!r} to be compiled. Call model.compile(optimizer=..., "
            "loss=...) first; or, without compiling, use bridge.from_keras with a loss and an "
            "optimizer of your own."
        )
