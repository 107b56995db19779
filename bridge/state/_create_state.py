"""A Keras model's variables as a TrainState."""

import warnings
from typing import Any, Literal

import jax
import keras
import optax

from bridge.model import _variables
from bridge.model._from_keras import require_built
from bridge.model._pure_layers import warn_of_frozen
from bridge.optim._constraints import keeps_constraints
from bridge.optim._optimizers import inner, made_of
from bridge.state import _transfer
from functrain import TrainState
from functrain.internal import PyTree
from functrain.internal import tree as _tree


def create_state(
    model: keras.Layer,
    tx: optax.GradientTransformation,
    *,
    rng: jax.Array | None = None,
    optimizer: Literal["auto", "require", "new"] = "auto",
) -> TrainState:
    """Returns a Keras model's variables as a TrainState, for the first step or for going on.

    Args:
      model: A built `keras.Model` or layer. Its variables are copied, so that it stays alive when
        a program consumes the state.
      tx: The optimizer.
      rng: None to draw randomness from Keras's own seed counters, which live in `model_state` and
        move on; or a typed key `key[]`, from which every step reseeds every SeedGenerator.
      optimizer: Whether `opt_state` and `step` go on where the optimizer that the model was
        compiled with is now. "auto": if `tx` is ``bridge.optimizer(model.optimizer)``, native or
        not, or the `tx` of its OptaxOptimizer, and it has been built. "require": in any case, also
        where Keras's Adam, AdamW, Lion, RMSprop, Adagrad or Adadelta goes on as optax's. "new":
        never.

    Returns:
      A TrainState of nested dicts: `params` are the trainable variables (float32 masters under a
      mixed precision policy), `model_state` all others. Paths are the same for every instance of
      an architecture.

    Raises:
      TypeError: `model` is not a Keras layer, or `rng` not a single typed key.
      ValueError: `model` is not built; or what its optimizer remembers is required, and `tx` has
        another state.

    Examples:
      >>> import keras, optax
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")])
      >>> state = create_state(model, optax.sgd(0.1))
      >>> state.params["out"]["kernel"].shape
      (3, 2)
    """
    require_built(model)
    warn_of_frozen(model)
    where = _variables.layout(model)
    params, model_state = _variables.values(where)
    state = TrainState.create(params=params, model_state=model_state, tx=tx, rng=rng)
    if optimizer == "require" or (optimizer == "auto" and _goes_on(tx, model)):
        try:
            opt_state, step = _transfer.from_optimizer(state.opt_state, model)
        except _transfer.UnfitError as error:
            raise ValueError(
                f"model: expected an optimizer that tx can go on from: {error}.\n"
                'To start anew: bridge.create_state(model, tx, optimizer="new").'
            ) from error
        state = state.replace(opt_state=opt_state, step=_tree.copy(step))
    _warn_of_constraints(where, state.opt_state)
    return state


def _goes_on(tx: Any, model: Any) -> bool:
    """Whether tx was made of the optimizer that the model was compiled with, and is built."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return False
    return made_of(tx) is optimizer or getattr(inner(optimizer), "tx", None) is tx


def _warn_of_constraints(where: _variables.Layout, opt_state: PyTree) -> None:
    held = ["/".join(path) for path, v in where.params.items() if v.constraint is not None]
    if held and not keeps_constraints(opt_state):
        warnings.warn(
            "These variables have constraints, which Keras's optimizers apply after an update and "
            f"optax does not:\n{_tree.bullets(held)}\n"
            "To train within them: tx = optax.chain(tx, bridge.constraints(model)), or "
            "bridge.optimizer(keras_optimizer, model=model).",
            stacklevel=3,
        )
