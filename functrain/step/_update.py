"""One gradient step, the building block of training steps."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.model._split import join, split_scales
from functrain.step._check import check_loss
from functrain.step._dropped_state import warn_of_dropped_state
from functrain.step._loss import Aux, LossFn
from functrain.step._notes import error_notes
from functrain.step._state import TrainState, check_tx
from functrain.tx._guards import scale_loss, taken_and_scale, unscale_gradients


def update(
    state: TrainState, loss_fn: LossFn, tx: optax.GradientTransformation, *args: PyTree
) -> tuple[TrainState, jax.Array, Aux]:
    """Takes one gradient step. `train_step` is built on it; for a GAN, call it twice.

    Args:
      state: The state. The loss gets its `rng`, folded with its `step`. For random numbers outside
        of the loss, see `step_key`: they must not depend on the same key.
      loss_fn: ``loss_fn(params, model_state, *args, rng=, training=True) -> (f32[], Aux)``.
      tx: The optimizer. If its `update` takes `value`, `grad`, `value_fn` (line searches, plateau
        schedules), `obj_fn` (`optax.contrib.sophia`) or `grad_fn` (`optax.contrib.sam`), it gets
        them, for the same batch and random numbers. With `optax.lookahead`, whose params are
        `optax.LookaheadParams`, the loss gets both; `supervised` trains the fast params and
        evaluates the slow ones. `skip_non_finite` and `loss_scale` are supported.
      *args: Further arguments of `loss_fn`, usually one batch.

    Returns:
      The new state (with the `model_state` of the aux, and `step` one higher), the loss `f32[]`
      before the update, and the aux.

    Raises:
      TypeError: (when traced) `state` is not a TrainState, `loss_fn` is not a loss, or `tx` is not
        an optax transformation; or the loss does not return a pair of a scalar and an Aux, or draws
        random numbers although the state has no `rng`.
      ValueError: (when traced) the state's `opt_state` belongs to another optimizer, or
        `skip_non_finite` guards only a part of it.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> def loss_fn(params, model_state, x, *, rng, training):
      ...     return jnp.sum((params["w"] - x) ** 2), Aux(model_state)
      >>> tx = optax.sgd(0.25)
      >>> state = TrainState.create(params={"w": jnp.zeros(2)}, tx=tx)
      >>> state, loss, aux = update(state, loss_fn, tx, jnp.ones(2))
      >>> print(loss, state.params["w"])
      2.0 [0.5 0.5]
    """
    # By its method, so that subclasses and similar classes work.
    if not hasattr(state, "apply_gradients"):
        raise TypeError(
            f"state: expected a TrainState, got {type(state).__name__}. Make one with "
            "functrain.TrainState.create(params=params, tx=tx). For a population, use "
            "population.step(step)."
        )
    check_loss(loss_fn)
    check_tx(tx)
    # The key is a function of the step, so that a resumed run draws the same numbers.
    rng = None if state.rng is None else jax.random.fold_in(state.rng, state.step)

    # Gradients of float16 models underflow, so `loss_scale` multiplies the loss before it is
    # differentiated. The loss that is reported is not scaled.
    _, scale = taken_and_scale(state.opt_state)
    # The loss of `micro_batches` is differentiated in parts.
    if hasattr(loss_fn, "with_scale"):
        loss_fn = loss_fn.with_scale(scale)

    scales, _ = split_scales(state.model_state)

    def loss_and_aux(params: PyTree, scales: PyTree = scales) -> tuple[jax.Array, Aux]:
        model_state = join(scales, state.model_state)
        return compute_loss(loss_fn, params, model_state, *args, rng=rng, training=True)

    scaled_loss = scaled(loss_and_aux, scale)

    def value_fn(params: PyTree) -> jax.Array:
        """Returns the loss at other params, for line searches."""
        return loss_and_aux(params)[0]

    def grad_fn(params: PyTree, adversarial_step: Any) -> PyTree:
        """Returns the gradients at other params, for `optax.contrib.sam`."""
        return unscale_gradients(jax.grad(lambda p: scaled_loss(p)[0])(params), scale)

    differentiate = jax.value_and_grad(scaled_loss, argnums=(0, 1), has_aux=True)
    (_, (loss, aux)), (grads, new_scales) = differentiate(state.params, scales)
    grads = unscale_gradients(grads, scale)
    new = state.apply_gradients(
        grads,
        tx,
        value=loss,
        grad=grads,
        value_fn=value_fn,
        # The name that `optax.contrib.sophia` has for it.
        obj_fn=value_fn,
        grad_fn=grad_fn,
    )
    taken, _ = taken_and_scale(new.opt_state)
    # Float8 scales have new values in place of gradients.
    model_state = aux.model_state
    # A loss may have dropped the model state, which is said where states are compared.
    if jax.tree.leaves(new_scales):
        model_state = join(new_scales, model_state)
    # `skip_non_finite` checks the loss, the gradients and the updates, but does not see the model
    # state. The forward pass of a skipped step may have put NaN into it, as into batch statistics.
    if taken is not None:
        model_state = _tree.select(taken, model_state, state.model_state)
    return new.replace(model_state=model_state), loss, aux


def scaled(
    loss_and_aux: Callable[..., tuple[jax.Array, Aux]], scale: jax.Array | None
) -> Callable[..., tuple[jax.Array, tuple[jax.Array, Aux]]]:
    """Returns ``(...) -> (scaled loss, (loss, Aux))``, to be differentiated."""

    def scaled_loss(*args: PyTree) -> tuple[jax.Array, tuple[jax.Array, Aux]]:
        loss, aux = loss_and_aux(*args)
        return scale_loss(loss, scale), (loss, aux)

    return scaled_loss


def compute_loss(
    loss_fn: LossFn, params: PyTree, model_state: PyTree, *args: PyTree, rng: Any, training: bool
) -> tuple[jax.Array, Aux]:
    """Returns ``loss_fn(params, model_state, *args, rng=rng, training=training)``.

    Warns of a loss that returns a dict in training, although it computes a new model state.

    Raises:
      TypeError: The loss draws random numbers and `rng` is None, or it does not return a pair of a
        scalar and an Aux or a dict of logs.
    """

    def loss_of(model_state: PyTree) -> Any:
        return loss_fn(params, model_state, *args, rng=rng, training=training)

    try:
        # Noted here and not only in the loops, so that a step called by hand has the notes too.
        with error_notes(args[0] if len(args) == 1 else args):
            result = loss_of(model_state)
    except Exception as error:
        # The errors of jax, flax and Equinox for None in place of a key say no more than that.
        if rng is None and _MISSING_KEY.search(str(error)):
            error.add_note(
                "The loss was called with rng=None. Pass rng=jax.random.key(seed) to "
                "TrainState.create, and to eval_step if it draws random numbers in evaluation too."
            )
        raise
    loss, aux = _check_result(result, model_state)
    if training and isinstance(result[1], Mapping):
        warn_of_dropped_state(loss_of, model_state)
    return loss, aux


_MISSING_KEY = re.compile("PRNG|requires a key")


def _check_result(result: Any, model_state: PyTree) -> tuple[jax.Array, Aux]:
    """Returns the loss and the Aux; raises TypeError unless the result is such a pair."""
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    aux: Any
    loss, aux = result if is_pair else (None, None)
    # A plain dict of logs, of a loss that leaves the model state as it was.
    if isinstance(aux, Mapping):
        aux = Aux(model_state, logs=aux)
    is_valid = isinstance(aux, Aux)
    advice = "Write: return loss, functrain.Aux(model_state), or return loss, {'name': value}."
    require(is_valid, "loss_fn", "(loss, Aux(...)) from it", result, advice, error=TypeError)
    loss = jnp.asarray(loss)
    is_scalar = loss.shape == () and jnp.issubdtype(loss.dtype, jnp.floating)
    advice = "Reduce it with jnp.mean, or let functrain.supervised do that."
    require(is_scalar, "loss_fn", "a scalar loss, float32[]", loss, advice, error=TypeError)
    return loss, aux
