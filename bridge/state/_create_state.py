"""`create_state`: a TrainState with a Keras model's variables."""

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
    if optimizer is None or not optimizer.built:
        return False
    return origin(tx) is optimizer or getattr(inner_optimizer(optimizer), "tx", None) is tx


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
