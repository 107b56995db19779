"""Guards against gradients that are not finite: skipped updates, and scaled losses."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.tx._extra_args import with_any_extra_args


class SkipState(NamedTuple):
    """What `skip_non_finite` remembers.

    Attributes:
      inner: The state of what it wraps, as of the last update that was finite.
      finite: `bool[]`, whether the last update was.
      logs: How many were not, `i32[]` each: ``skipped`` of all, ``skipped_in_a_row`` up to now.
    """

    inner: PyTree
    finite: jax.Array
    logs: optax.SnapshotState


def skip_non_finite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation that leaves everything as it is where gradients are not finite.

    A step whose loss or gradients hold NaN or infinity is taken, but changes neither `params` nor
    `model_state` nor what `tx` remembers, not a bit of them: `update` and `train_step` see to the
    model state. `step` and randomness go on, so that the next batch is met as ever. `train_step`
    logs the counts ``skipped`` and ``skipped_in_a_row``, and the loss as it was; its metrics, and
    the means over an epoch in a history, are those of the other steps. A run in which all is finite
    is the same to the bit with it and without.

    `optax.apply_if_finite` does less: it knows of no model state, such as batch statistics, and
    lets NaN pass after some errors in a row.

    Args:
      tx: All of the optimizer: schedules, clipping, `optax.MultiSteps`, `ema`. Nothing goes
        around it, or it would see a step that never was.

    Returns:
      A transformation that takes the loss as `value=`, if it is given; `update` gives it.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> tx = skip_non_finite(optax.adam(0.1))
      >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
      >>> state = state.apply_gradients({"w": jnp.array([1.0, jnp.inf])}, tx)
      >>> print(state.step, state.params["w"], state.opt_state.finite)
      1 [1. 1.] False
    """
    inner = with_any_extra_args(tx)

    def init(params: PyTree) -> SkipState:
        counts = {name: jnp.zeros((), jnp.int32) for name in ("skipped", "skipped_in_a_row")}
        return SkipState(tx.init(params), jnp.array(True), optax.SnapshotState(counts))

    def update(
        updates: PyTree, state: SkipState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, SkipState]:
        looked_at = jax.tree.leaves((updates, extra_args.get("value")))
        finite = jnp.all(jnp.array([True, *(jnp.all(jnp.isfinite(x)) for x in looked_at)]))
        updates, new = inner.update(updates, state.inner, params, **extra_args)
        # -0.0 is the number that changes no other: 0.0 makes 0.0 of -0.0.
        updates = jax.tree.map(lambda x: jnp.where(finite, x, -jnp.zeros_like(x)), updates)
        counts = state.logs.measurement
        counts = {
            "skipped": counts["skipped"] + (~finite).astype(jnp.int32),
            "skipped_in_a_row": jnp.where(finite, 0, counts["skipped_in_a_row"] + 1),
        }
        kept = _tree.select(finite, new, state.inner)
        return updates, SkipState(kept, finite, optax.SnapshotState(counts))

    return optax.GradientTransformationExtraArgs(init, update)


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
    initial_scale: float = 2.0**15,
    growth_interval: int = 2000,
    factor: float = 2.0,
    min_scale: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation with a dynamic loss scale: for float16, whose range is small.

    `update` and `train_step` multiply the loss by the scale before they take the gradient, and
    divide the gradient by it, so that `tx` and the logs see the true ones. Where the gradient is
    not finite, the step is skipped as by `skip_non_finite`, and the scale is divided by `factor`;
    after `growth_interval` finite ones in a row it is multiplied. `train_step` logs it as
    ``loss_scale``, and the counts of skipped steps.

    Method: "Mixed precision training", Micikevicius et al., 2018, section 3.2. With bfloat16,
    whose range is that of float32, no scale is needed.

    Args:
      tx: All of the optimizer, as for `skip_non_finite`.
      initial_scale: The first scale. Powers of two change no gradient but by its range.
      growth_interval: After how many finite updates the scale grows.
      factor: By how much the scale changes.
      min_scale: What it does not fall below.

    Raises:
      ValueError: A number makes no sense.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> tx = loss_scale(optax.sgd(0.1), initial_scale=1024.0)
      >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
      >>> print(state.apply_gradients({"w": jnp.full(2, jnp.inf)}, tx).opt_state.scale)
      512.0
    """
    makes_sense = 0 < min_scale <= initial_scale and growth_interval >= 1 and factor > 1
    numbers = {
        "initial_scale": initial_scale,
        "growth_interval": growth_interval,
        "factor": factor,
        "min_scale": min_scale,
    }
    expected = "0 < min_scale <= initial_scale, growth_interval >= 1 and factor > 1"
    require(makes_sense, "loss_scale", expected, numbers)
    skipping = skip_non_finite(tx)

    def init(params: PyTree) -> LossScaleState:
        scale = jnp.asarray(initial_scale, jnp.float32)
        logs = optax.SnapshotState({"loss_scale": scale})
        return LossScaleState(skipping.init(params), scale, jnp.zeros((), jnp.int32), logs)

    def update(
        updates: PyTree, state: LossScaleState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, LossScaleState]:
        updates, skip = skipping.update(updates, state.skip, params, **extra_args)
        row = jnp.where(skip.finite, state.finite_in_a_row + 1, 0)
        larger = state.scale * factor
        grows = (row >= growth_interval) & jnp.isfinite(larger)
        good = jnp.where(grows, larger, state.scale)
        scale = jnp.where(skip.finite, good, jnp.maximum(state.scale / factor, min_scale))
        row = jnp.where(row >= growth_interval, 0, row)
        logs = optax.SnapshotState({"loss_scale": state.scale})
        return updates, LossScaleState(skip, scale, row, logs)

    return optax.GradientTransformationExtraArgs(init, update)


def scaled(loss: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns the loss to take the gradient of: `f32[]`, or wider."""
    if scale is None:
        return loss
    wide = _tree.at_least_float32(loss)
    return wide * scale.astype(wide.dtype)


def unscaled(grads: PyTree, scale: jax.Array | None) -> PyTree:
    """Returns the gradients of the true loss, in their own dtypes."""
    if scale is None:
        return grads

    def one(x: jax.Array) -> jax.Array:
        wide = _tree.at_least_float32(x)
        return (wide / scale.astype(wide.dtype)).astype(x.dtype)

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
            "functrain.tx.skip_non_finite(optax.chain(...)), or around optax.MultiSteps(...)."
        )
    return skip.finite if isinstance(skip, SkipState) else None, scale
