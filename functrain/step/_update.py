"""One gradient step: the piece that steps are made of."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.step._loss import Aux, LossFn
from functrain.step._state import TrainState
from functrain.tx._guards import finite_and_scale, scale_loss, unscale_gradients


def update(
    state: TrainState, loss_fn: LossFn, tx: optax.GradientTransformation, *args: PyTree
) -> tuple[TrainState, jax.Array, Aux]:
    """Takes one gradient step: the piece `train_step` is made of; a GAN is two of these.

    Args:
      state: Its `rng`, folded with its `step`, is the randomness of the loss.
      loss_fn: ``loss_fn(params, model_state, *args, rng=, training=True) -> (f32[], Aux)``.
      tx: The optimizer. One whose `update` takes `value`, `grad`, `value_fn` (line searches,
        plateau schedules) or `grad_fn` (`optax.contrib.sam`) gets them, of the same batch and
        random numbers; what `skip_non_finite` and `loss_scale` need is done.
      *args: Passed on to `loss_fn`, usually one batch.

    Returns:
      The new state (`model_state` from the aux, `step` one higher), the loss `f32[]` before the
      update, and the aux.

    Raises:
      TypeError: (when traced) the state is no TrainState; the loss is no scalar, or no pair of a
        scalar and an Aux; or it draws random numbers and the state has no `rng`.
      ValueError: (when traced) the state's `opt_state` is another optimizer's, or guarded in part
        by `skip_non_finite`.

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
    if not hasattr(state, "apply_gradients"):
        raise TypeError(
            f"state: expected a TrainState, got {type(state).__name__}. Make one with "
            "functrain.TrainState.create(params=params, model_state=model_state, tx=tx). The step "
            "of a population is functrain.population.step(step)."
        )
    rng = None if state.rng is None else jax.random.fold_in(state.rng, state.step)

    def loss_of(params: PyTree) -> tuple[jax.Array, Aux]:
        return value_of(loss_fn, params, state.model_state, *args, rng=rng, training=True)

    def scaled_loss(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, Aux]]:
        loss, aux = loss_of(params)
        return scale_loss(loss, scale), (loss, aux)

    def grad_fn(params: PyTree, _: Any) -> PyTree:
        """Returns the gradients at other params; optax numbers the adversarial steps."""
        return unscale_gradients(jax.grad(lambda p: scaled_loss(p)[0])(params), scale)

    _, scale = finite_and_scale(state.opt_state)
    (_, (loss, aux)), grads = jax.value_and_grad(scaled_loss, has_aux=True)(state.params)
    grads = unscale_gradients(grads, scale)
    new = state.apply_gradients(
        grads,
        tx,
        value=loss,
        grad=grads,
        value_fn=lambda params: loss_of(params)[0],
        grad_fn=grad_fn,
    )
    finite, _ = finite_and_scale(new.opt_state)
    model_state = aux.model_state
    if finite is not None:
        model_state = _tree.select(finite, model_state, state.model_state)
    return new.replace(model_state=model_state), loss, aux


def value_of(
    loss_fn: LossFn, *args: PyTree, rng: jax.Array | None, training: bool
) -> tuple[jax.Array, Aux]:
    """Calls a loss, and says what is wrong with what it wants or returns."""
    try:
        result = loss_fn(*args, rng=rng, training=training)
    except TypeError as error:
        if rng is None and "PRNG key" in str(error):
            raise TypeError(f"loss_fn: {_NO_RNG[training]}") from error
        raise
    return _checked(result)


_NO_RNG = {
    True: "expected a state with an rng, since it draws random numbers, got rng=None. Create the "
    "state with TrainState.create(..., rng=jax.random.key(seed)).",
    False: "expected no drawing in evaluation, where rng is None. Draw only `if training:`, which "
    "is a Python bool; or give keys to evaluation too: "
    "eval_step(loss_fn, rng=jax.random.key(seed)).",
}


def _checked(result: Any) -> tuple[jax.Array, Aux]:
    """Returns what a loss returned, or says what is wrong with it."""
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    loss, aux = result if is_pair else (None, None)
    if not isinstance(aux, Aux):
        raise TypeError(
            "loss_fn: expected it to return (loss, functrain.Aux(model_state)), got "
            f"{_shown(result)}. End it with: return loss, functrain.Aux(model_state)"
        )
    loss = jnp.asarray(loss)
    is_scalar = loss.shape == () and jnp.issubdtype(loss.dtype, jnp.floating)
    advice = "Reduce it with jnp.mean, or let functrain.supervised do that."
    require(is_scalar, "loss_fn", "a scalar loss, float32[]", loss, advice, error=TypeError)
    return loss, aux


def _shown(result: Any) -> str:
    """Returns what a loss returned as dtypes and shapes: a tracer's own repr says neither."""
    if isinstance(result, tuple | list):
        return f"({', '.join(map(_shown, result))})"
    return "None" if result is None else _tree.spec(result)
