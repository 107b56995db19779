"""A TrainState with a Keras model's variables: `create_state`, and `to_keras` back."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import jax
import keras
import optax

from bridge.model import _variables
from bridge.model._from_keras import require_built
from bridge.optim._constraints import applies_constraints
from bridge.optim._optimizers import inner_optimizer, origin
from bridge.optim._slots import KerasOptState
from bridge.state import _transfer
from bridge.state._keras_state import KerasState, write_keras_state
from functrain import TrainState
from functrain.internal import PyTree, require, require_one_of, warn
from functrain.internal import tree as _tree


def create_state(
    model: keras.Layer,
    tx: optax.GradientTransformation,
    *,
    rng: jax.Array | None = None,
    optimizer: Literal["auto", "require", "new"] = "auto",
) -> TrainState:
    """Returns a TrainState with a Keras model's variables, to begin or to continue training.

    Args:
      model: A built `keras.Model` or layer. Its variables are copied, so that the model stays
        usable when a program donates the state.
      tx: The optimizer.
      rng: None to draw randomness from Keras's own seed counters, which are in `model_state` and
        advance with each step; or a typed key `key[]`, from which every step reseeds every
        SeedGenerator.
      optimizer: Says when `opt_state` and `step` continue from the optimizer that the model was
        compiled with. "auto": if that optimizer is built, and `tx` is
        ``bridge.optimizer(model.optimizer)``, or the `tx` of its OptaxOptimizer.
        "require": always, also if `tx` contains that transformation, as a part of a chain or under
        a mask. "new": never.

    Returns:
      A TrainState of nested dicts: `params` are the trainable variables (float32 masters under a
      mixed precision policy), `model_state` all others. Float8 scales are in `model_state` too:
      `functrain.update` replaces them by their gradients, and no optimizer sees them. The
      keys are the names that `summary` shows; an unnamed layer in an attribute of a subclass has
      the name of the attribute. Keras numbers unnamed layers over the whole process: name them, or
      call `keras.utils.clear_session()` before the model is built, for keys that do not depend on
      the models before.

    Raises:
      TypeError: `model` is not a Keras layer, or `rng` is not a single typed key.
      ValueError: `model` is not built; `optimizer` is none of these words; or its optimizer's slots
        are required, and the state of `tx` cannot hold them; or the model has float8 scales, and
        `tx` is a Keras optimizer that accumulates gradients.

    Examples:
      >>> import keras, optax
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")])
      >>> state = create_state(model, optax.sgd(0.1))
      >>> state.params["out"]["kernel"].shape
      (3, 2)
    """
    require_one_of("optimizer", optimizer, ("auto", "require", "new"))
    require_built(model)
    layout = _variables.layout(model)
    params, model_state = _variables.values(layout)
    state = TrainState.create(params=params, model_state=model_state, tx=tx, rng=rng)
    slots = [name for node in _tree.nodes(state.opt_state, KerasOptState) for name in node.slots]
    # Keras takes the largest scale of the steps between two updates, which only its `fit` knows.
    accumulates = "accumulated_gradients" in slots and _variables.OVERWRITTEN in model_state
    expected = "no gradient_accumulation_steps with float8 scales"
    advice = "Use functrain.micro_batches, or bridge.fit."
    require(not accumulates, "tx", expected, tx, advice)
    if optimizer == "require" or (optimizer == "auto" and _is_compiled_optimizer(tx, model)):
        opt_state, step = _transfer.from_optimizer(state.opt_state, model)
        # A program may donate the state, and the optimizer still needs its own counter.
        state = state.replace(opt_state=opt_state, step=_tree.copy(step))
    _warn_of_constraints(layout, state.opt_state)
    return state


def _is_compiled_optimizer(tx: Any, model: Any) -> bool:
    """Returns True if `tx` was made of the model's compiled optimizer, and that is built."""
    optimizer = getattr(model, "optimizer", None)
    is_origin = origin(tx) is optimizer or getattr(inner_optimizer(optimizer), "tx", None) is tx
    return is_origin and getattr(optimizer, "built", False)


def _warn_of_constraints(layout: _variables.Layout, opt_state: PyTree) -> None:
    """Warns if variables have constraints that `tx` does not apply."""
    # Only trainable variables are updated, so only their constraints could be broken.
    constrained = ["/".join(path) for path, v in layout.params.items() if v.constraint is not None]
    if constrained and not applies_constraints(opt_state):
        warn(
            "These variables have constraints, which Keras's optimizers apply after an update and "
            f"optax does not:\n{_tree.bullets(constrained)}\n"
            "To train within them: tx = optax.chain(tx, bridge.constraints(model)), or "
            "bridge.optimizer(keras_optimizer, model=model)."
        )


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
        params, model_state = _variables.from_collections(state)
        state = SimpleNamespace(params=params, model_state=model_state)
        optimizer = "leave"
    is_state = hasattr(state, "params") and hasattr(state, "model_state")
    expected = "a TrainState, or anything with .params and .model_state"
    advice = "The order is bridge.to_keras(state, model)."
    require(is_state, "state", expected, state, advice, error=TypeError)
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
