"""`to_keras`: writes a state into its Keras model."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import flax.core
import keras

from bridge.model import _variables
from bridge.model._from_keras import require_built
from bridge.state import _transfer
from bridge.state._keras_state import KerasState, write_keras_state
from functrain.internal import is_frozen, require_one_of


def to_keras(
    state: Any,
    model: keras.Layer,
    *,
    optimizer: Literal["auto", "require", "leave"] = "auto",
) -> keras.Layer:
    """Writes a state into the Keras model it came from, or another model of its architecture.

    Every variable is copied, seed counters too; if any value does not fit, nothing is written.
    A KerasState also has values for the optimizer and the metrics. A TrainState has values for
    the slots and the iterations of a compiled optimizer if both are known to mean the same: if the
    state is that of `bridge.optimizer` of such an optimizer, or of the model's
    OptaxOptimizer. The slots of frozen params keep their values.

    Args:
      state: A TrainState, or any object with `params` and `model_state`; or a KerasState; or the
        variables of `bridge.to_linen(model)`, a dict of collections. For a model of
        `functrain.freeze` or `functrain.lora`, pass ``functrain.merge_frozen(state)``.
      model: A built `keras.Model` or layer.
      optimizer: "auto" leaves the optimizer unchanged if the state does not fit it, "require"
        raises then, and "leave" always leaves it unchanged. Ignored for a KerasState.

    Returns:
      `model`.

    Raises:
      TypeError: `state` has no `params` or `model_state`, or is being traced; or `model` is not a
        Keras layer.
      ValueError: `model` is not built; `optimizer` is none of these words; the state is not one of
        this architecture (the message names the leaves); the state is that of a frozen model, or
        has adapters; or the optimizer is required, and `opt_state` does not fit it.

    Examples:
      >>> import bridge, jax, keras, numpy as np, optax
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
      >>> state = bridge.create_state(model, optax.sgd(0.1))
      >>> state = state.replace(params=jax.tree.map(lambda p: 0 * p, state.params))
      >>> float(np.sum(to_keras(state, model)(np.ones((1, 3)))))
      0.0
    """
    require_one_of("optimizer", optimizer, ("auto", "require", "leave"))
    require_built(model)
    if isinstance(state, KerasState):
        return write_keras_state(state, model)
    if isinstance(state, Mapping) and "params" in state:
        # These are the variables of a linen module, which have no optimizer state.
        params = flax.core.unfreeze(state["params"])
        model_state = _variables.from_collections(state)
        state = SimpleNamespace(params=params, model_state=model_state)
        optimizer = "leave"
    if not (hasattr(state, "params") and hasattr(state, "model_state")):
        raise TypeError(
            "state: expected a TrainState, or anything with .params and .model_state, got "
            f"{type(state).__name__}. The order is bridge.to_keras(state, model)."
        )
    if is_frozen(state):
        raise ValueError(
            "state: expected all params of the model, got a part of them. Pass the whole: "
            "bridge.to_keras(functrain.merge_frozen(state), model)."
        )
    # All pairs are made and checked before any is written: a model is written whole or not at all.
    layout = _variables.layout_of_state(model, state.params, state.model_state)
    pairs = _variables.pair(layout, state.params, state.model_state)
    opt_state = () if optimizer == "leave" else getattr(state, "opt_state", ())
    trees = {"params": state.params, "model_state": state.model_state, "opt_state": opt_state}
    _variables.require_values(trees)
    if optimizer != "leave":
        try:
            step = getattr(state, "step", None)
            pairs += _transfer.to_optimizer(opt_state, model, layout, step=step)
        except _transfer.OptimizerMismatchError:
            if optimizer == "require":
                raise
    _variables.assign_all(pairs)
    return model
