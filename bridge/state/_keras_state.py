"""Keras's own state of a compiled model, as arrays."""

from typing import Any, TypeAlias

import flax.struct
import jax
import keras

from bridge import keras_private
from bridge.model import _variables
from functrain.internal import PyTree, call, require, require_no_problems
from functrain.internal import tree as _tree

Variables: TypeAlias = list[Any]
# In the order in which Keras's own train_step takes and returns them.
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
        return call(self, **vars(self))


def keras_state(model: keras.Model, batch: PyTree = None) -> KerasState:
    """Returns copies of all variables of a compiled model.

    Args:
      model: A compiled model.
      batch: One batch as `fit` would make it: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
        Needed before the first `fit`: Keras builds compiled losses and metrics, and a model that
        was not built, at the first batch.

    Returns:
      The state for `train_step` and `test_step`. The model stays usable when a program donates
      the state.

    Raises:
      TypeError: `model` is not a keras.Model.
      ValueError: `model` is not compiled; or it, its losses or metrics are not built, and `batch`
        is None.

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
    # Metrics make their variables at the first batch, so a state made before would lack them.
    expected = "a model that is built, with its compiled loss and metrics"
    advice = "Keras does it at the first batch. Pass one: bridge.keras_state(model, batch=(x, y))."
    require(keras_private.trainer.is_built(model), "model", expected, model, advice)
    # A program may donate the state, and the model must keep its values.
    state: KerasState = _tree.copy(variable_values(model))
    return state


def write_keras_state(state: KerasState, model: keras.Model) -> keras.Model:
    """Copies a state into the variables of its model: all of them, or none if one does not fit."""
    require_compiled(model)
    _variables.require_values(state)
    # Checked as a whole first, so that a state that does not fit changes nothing.
    advice = (
        "Freezing layers, and compiling again, change the lists of variables: make a new state "
        "with bridge.keras_state(model). The model is unchanged."
    )
    differences = _tree.differences(variable_values(model), state)
    expected = f"the state of the compiled model {model.name!r}"
    require_no_problems("state", differences, expected, advice)
    variables = jax.tree.leaves(KerasState(**variable_lists(model)))
    _variables.assign_all(list(zip(variables, jax.tree.leaves(state), strict=True)))
    return model


def variable_lists(model: keras.Model) -> dict[str, Variables]:
    """Returns Keras's four lists of variables, in the order of KerasState."""
    # A model that was never compiled may lack the attribute `optimizer`.
    return {
        "trainable": model.trainable_variables,
        "non_trainable": model.non_trainable_variables,
        "optimizer": getattr(getattr(model, "optimizer", None), "variables", []),
        "metrics": model.metrics_variables,
    }


def variable_paths(model: keras.Model) -> dict[str, str]:
    """Returns the path of each variable, by the path of its value in a KerasState."""
    paths: dict[str, str] = {}
    for name, variables in variable_lists(model).items():
        for i, variable in enumerate(variables):
            paths[f"{name}/{i}"] = variable.path
    return paths


def variable_values(model: keras.Model) -> KerasState:
    """Returns the arrays of a model's variables, not copied."""
    lists = variable_lists(model)
    values = {name: [x.value for x in variables] for name, variables in lists.items()}
    return KerasState(**values)


def require_compiled(model: Any) -> None:
    """Raises TypeError if `model` is not a Keras model, ValueError if it is not compiled."""
    is_trainer = keras_private.trainer.is_trainer(model)
    require(is_trainer, "model", "a keras.Model", model, error=TypeError)
    advice = "Call model.compile(optimizer, loss), or use bridge.from_keras and optax."
    require(model.compiled, "model", "a compiled model", model, advice)
