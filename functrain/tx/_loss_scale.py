"""Losses scaled, so that small gradients do not vanish in float16."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.tx._skip import SkipState, skip_non_finite


class LossScaleState(NamedTuple):
    """What `loss_scale` remembers.

    Attributes:
      skip: That of `skip_non_finite`, with the state of what is wrapped.
      scale: `f32[]`, by which the next loss is multiplied.
      finite_in_a_row: `i32[]`, updates since the scale was changed.
      logs: The scale of the last update, ``loss_scale``.
    """

    skip: SkipState
    scale: jax.Array
    finite_in_a_row: jax.Array
    logs: optax.SnapshotState


def loss_scale(
    tx: optax.GradientTransformation,
    *,
    initial: float = 2.0**15,
    interval: int = 2000,
    factor: float = 2.0,
    least: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation with a dynamic loss scale: for float16, whose range is small.

    `update` and `train_step` multiply the loss by the scale before they take the gradient, and
    divide the gradient by it, so that `tx` and the logs see the true ones. Where the gradient is
    not finite, the step is skipped as by `skip_non_finite`, and the scale is divided by `factor`;
    after `interval` finite ones in a row it is multiplied. `train_step` logs it as ``loss_scale``,
    and the counts of skipped steps.

    Method: "Mixed precision training", Micikevicius et al., 2018, section 3.2. With bfloat16,
    whose range is that of float32, no scale is needed.

    Args:
      tx: All of the optimizer, as for `skip_non_finite`.
      initial: The first scale. Powers of two change no gradient but by its range.
      interval: After how many finite updates the scale grows.
      factor: By how much the scale changes.
      least: What it does not fall below.

    Raises:
      ValueError: A number makes no sense.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> tx = loss_scale(optax.sgd(0.1), initial=1024.0)
      >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
      >>> print(state.apply_gradients({"w": jnp.full(2, jnp.inf)}, tx).opt_state.scale)
      512.0
    """
    if not (0 < least <= initial and interval >= 1 and factor > 1):
        raise ValueError(
            "loss_scale: expected 0 < least <= initial, interval >= 1 and factor > 1, got "
            f"initial={initial}, interval={interval}, factor={factor}, least={least}"
        )
    skipping = skip_non_finite(tx)

    def init(params: PyTree) -> LossScaleState:
        scale = jnp.asarray(initial, jnp.float32)
        logs = optax.SnapshotState({"loss_scale": scale})
        return LossScaleState(skipping.init(params), scale, jnp.zeros((), jnp.int32), logs)

    def update(
        updates: PyTree, state: LossScaleState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, LossScaleState]:
        updates, skip = skipping.update(updates, state.skip, params, **extra_args)
        row = jnp.where(skip.finite, state.finite_in_a_row + 1, 0)
        larger = state.scale * factor
        grows = (row >= interval) & jnp.isfinite(larger)
        good = jnp.where(grows, larger, state.scale)
        scale = jnp.where(skip.finite, good, jnp.maximum(state.scale / factor, least))
        row = jnp.where(row >= interval, 0, row)
        logs = optax.SnapshotState({"loss_scale": state.scale})
        return updates, LossScaleState(skip, scale, row, logs)

    return optax.GradientTransformationExtraArgs(init, update)


def scaled(loss: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns the loss to take the gradient of: `f32[]`, or wider."""
    if scale is None:
        return loss
    wide = jnp.promote_types(loss.dtype, jnp.float32)
    return loss.astype(wide) * scale.astype(wide)


def unscaled(grads: PyTree, scale: jax.Array | None) -> PyTree:
    """Returns the gradients of the true loss, in their own dtypes."""
    if scale is None:
        return grads

    def one(x: jax.Array) -> jax.Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return (x.astype(wide) / scale.astype(wide)).astype(x.dtype)

    return jax.tree.map(one, grads)


def guards(opt_state: PyTree) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns whether the last update was finite, and the scale, each None where nobody asks.

    Raises:
      ValueError: A part of the optimizer only is guarded.
    """
    scale = opt_state.scale if isinstance(opt_state, LossScaleState) else None
    skip = opt_state.skip if isinstance(opt_state, LossScaleState) else opt_state
    within = skip.inner if isinstance(skip, SkipState) else skip
    if _tree.nodes(within, SkipState, LossScaleState):
        raise ValueError(
            "tx: expected skip_non_finite or loss_scale around all of the optimizer, and one of "
            "them, since loss_scale skips, too; got one within another transformation. Write "
            "functrain.skip_non_finite(optax.chain(...)), or around optax.MultiSteps(...)."
        )
    return skip.finite if isinstance(skip, SkipState) else None, scale
