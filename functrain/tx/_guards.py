"""Guards against bad steps: those that are not finite, spikes, and loss scaling."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from functrain.common import _tree
from functrain.common._checks import is_positive, require, require_integer, require_no_problems
from functrain.common._log_values import LastValue, SkippedInARow
from functrain.common._types import PyTree
from functrain.tx._extra_args import with_any_extra_args

# The types of these names tell a loop which steps were skipped, and not to average the values.
_SKIPPED, _SKIPPED_IN_A_ROW = LastValue("skipped"), SkippedInARow("skipped_in_a_row")
_LOSS_SCALE = LastValue("loss_scale")


class SkipState(NamedTuple):
    """The state of `skip_non_finite` and `skip_spikes`.

    Attributes:
      inner: The state of the wrapped transformation after the last update that was not skipped.
      taken: `bool[]`, False if the last update was skipped.
      logs: The counts of skipped updates, `i32[]` each: ``skipped`` since the start,
        ``skipped_in_a_row`` since the last one that was not.
      recent: Of `skip_spikes`, `f32[2, window]`: the last finite losses and gradient norms, the
        newest first, spikes as their limits, and NaN where there are none yet.
    """

    inner: PyTree
    taken: jax.Array
    logs: optax.SnapshotState
    recent: jax.Array | tuple[()] = ()


def skip_non_finite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation that skips steps whose loss, gradients or updates are not finite.

    A step whose loss, gradients or updates contain NaN or infinity leaves `params`, `model_state`
    and the state of `tx` unchanged to the bit. (`update` and `train_step` restore the model state.)
    `step` still advances, and with it the randomness of the next step. `train_step` logs the counts
    ``skipped`` and ``skipped_in_a_row``, and the loss itself; its metrics, and the epoch means in
    a history, leave skipped steps out. A run without NaN or infinity gives the same bits with and
    without this wrapper, except that on processors with AVX-512 those of a convolutional model may
    differ by rounding (not with ``rewrites="off"``).

    `optax.apply_if_finite` does less: it does not protect model state, such as batch statistics,
    and it accepts NaN after a number of consecutive errors.

    Args:
      tx: The complete optimizer, including schedules, clipping, `optax.MultiSteps` and `ema`. A
        transformation around `skip_non_finite` would still see the skipped steps.

    Returns:
      A transformation whose `update` takes the loss as an optional keyword `value`, which
      `functrain.update` passes.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> tx = skip_non_finite(optax.adam(0.1))
      >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
      >>> state = state.apply_gradients({"w": jnp.array([1.0, jnp.inf])}, tx)
      >>> print(state.step, state.params["w"], state.opt_state.taken)
      1 [1. 1.] False
    """
    return _skipping(tx, (), lambda finite, loss, grads, recent: (finite, recent))


def skip_spikes(
    tx: optax.GradientTransformation, *, window: int = 128, factor: float = 6.0
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation that skips steps whose loss or gradient norm is a spike.

    A loss, or a norm of all gradients, is a spike if it is larger than the mean of the last
    `window` finite ones by more than `factor` standard deviations. Steps that are not finite are
    skipped, too. What skipping means is told in `skip_non_finite`. A spike enters the window as
    the largest number that is none: so a second one is a spike, too, and a training whose loss
    stays at another level goes on after some steps. Nothing is a spike before half of the window is
    filled.

    Args:
      tx: The complete optimizer, as for `skip_non_finite`. The norm is that of the gradients before
        it clips them.
      window: The number of steps that a spike is compared with.
      factor: The number of standard deviations.

    Raises:
      ValueError: `window` is below 2, or `factor` is not a positive number.

    References:
      `SkipStepOptimizer` in OLMo-core (Team OLMo, "2 OLMo 2 Furious", 2024), where a spike enters
      the window as it is.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> tx = skip_spikes(optax.sgd(0.1), window=4)
      >>> state = TrainState.create(params={"w": jnp.ones(1)}, tx=tx)
      >>> for size in (1.0, 1.1, 50.0):
      ...     state = state.apply_gradients({"w": jnp.full(1, size)}, tx)
      ...     print(state.opt_state.taken)
      True
      True
      False
    """
    require_integer("window", window, 2)
    require(is_positive(factor), "factor", "a positive number", factor)

    def judge(
        finite: jax.Array, loss: Any, grads: PyTree, recent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        norm = optax.tree.norm(jax.tree.map(_tree.at_least_float32, grads))
        new = jnp.stack([jnp.float32(0 if loss is None else loss), jnp.float32(norm)])
        limits = jnp.nanmean(recent, 1) + factor * jnp.nanstd(recent, 1)
        has_enough = jnp.sum(~jnp.isnan(recent[0])) >= window // 2
        limits = jnp.where(has_enough, limits, jnp.inf)
        shifted = jnp.concatenate([jnp.minimum(new, limits)[:, None], recent[:, :-1]], 1)
        return finite & jnp.all(new <= limits), jnp.where(finite, shifted, recent)

    return _skipping(tx, jnp.full((2, window), jnp.nan), judge)


Judge: TypeAlias = Callable[[jax.Array, Any, PyTree, Any], tuple[jax.Array, Any]]


def _skipping(
    tx: optax.GradientTransformation, recent: Any, judge: Judge
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation that skips some steps.

    Args:
      tx: The transformation.
      recent: What `judge` remembers at first.
      judge: ``(finite, loss, grads, recent) -> (taken, recent)``.
    """
    inner = with_any_extra_args(tx)

    def init(params: PyTree) -> SkipState:
        # In a SnapshotState, so that `logged` finds the counts.
        counts = {_SKIPPED: jnp.int32(0), _SKIPPED_IN_A_ROW: jnp.int32(0)}
        return SkipState(tx.init(params), jnp.array(True), optax.SnapshotState(counts), recent)

    def update(
        updates: PyTree, state: SkipState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, SkipState]:
        grads, loss = updates, extra_args.get("value")
        updates, new_inner = inner.update(grads, state.inner, params, **extra_args)
        # The updates too: `optax.contrib.sam` takes gradients at other params, within `inner`.
        checked_leaves = jax.tree.leaves((grads, loss, updates))
        is_finite = [jnp.all(jnp.isfinite(x)) for x in checked_leaves]
        # Params without leaves are finite, too.
        finite = jnp.all(jnp.array([True, *is_finite]))
        taken, recent = judge(finite, loss, grads, state.recent)
        # -0.0 instead of 0.0: x + -0.0 is x for every x, but -0.0 + 0.0 is 0.0.
        updates = jax.tree.map(lambda x: jnp.where(taken, x, -jnp.zeros_like(x)), updates)
        counts = state.logs.measurement
        counts = {
            _SKIPPED: counts[_SKIPPED] + (~taken).astype(jnp.int32),
            _SKIPPED_IN_A_ROW: jnp.where(taken, 0, counts[_SKIPPED_IN_A_ROW] + 1),
        }
        # `select` is a `cond`. `where` would be fused with the sums before it and could round them
        # differently, so that the bits would depend on this wrapper.
        new_inner = _tree.select(taken, new_inner, state.inner)
        return updates, SkipState(new_inner, taken, optax.SnapshotState(counts), recent)

    return optax.GradientTransformationExtraArgs(init, update)


class LossScaleState(NamedTuple):
    """The state of `loss_scale`.

    Attributes:
      skip: The state of `skip_non_finite`, which includes that of the wrapped transformation.
      scale: `f32[]`, the factor of the next loss.
      finite_in_a_row: `i32[]`, the number of finite updates since the scale last changed.
      logs: ``loss_scale``, the scale of the last update.
    """

    skip: SkipState
    scale: jax.Array
    finite_in_a_row: jax.Array
    logs: optax.SnapshotState


def loss_scale(
    tx: optax.GradientTransformation, *, initial_scale: float = 2.0**15, growth_interval: int = 2000
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation with a dynamic loss scale, for training in float16.

    The range of float16 is small, so that small gradients become zero. `update` and `train_step`
    therefore multiply the loss by the scale before they differentiate it, and divide the gradient
    by the scale afterwards: `tx` and the logs get the true values. If the loss, a gradient or
    an update is not finite, the step is skipped as by `skip_non_finite`, and the scale is halved,
    down to 1. After `growth_interval` consecutive finite steps it is doubled. `train_step` logs the
    scale as ``loss_scale``, and the counts of skipped steps.

    Method: "Mixed precision training", Micikevicius et al., 2018, section 3.2. Params stay in
    float32, and so do the gradients after the division; `functrain.cast` makes a model compute in
    float16. bfloat16 has the range of float32 and needs no scale.

    Args:
      tx: The complete optimizer, as for `skip_non_finite`.
      initial_scale: The first scale. A power of two adds no rounding error to the gradients.
      growth_interval: The number of consecutive finite updates after which the scale grows.

    Raises:
      ValueError: A number is out of range. From `init`: a param is float16.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> tx = loss_scale(optax.sgd(0.1), initial_scale=1024.0)
      >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
      >>> print(state.apply_gradients({"w": jnp.full(2, jnp.inf)}, tx).opt_state.scale)
      512.0
    """
    largest = float(np.finfo(np.float32).max)
    is_scale = 1 <= initial_scale <= largest
    require(is_scale, "initial_scale", "a number from 1 to the largest float32", initial_scale)
    require_integer("growth_interval", growth_interval)
    skipping = skip_non_finite(tx)

    def init(params: PyTree) -> LossScaleState:
        # Their gradients are float16, too: divided by the scale, small ones would be zero again.
        half = _tree.format_leaves(params, lambda x: jnp.result_type(x) == jnp.float16)
        advice = "Keep them in float32, and compute with functrain.cast(model, jnp.float16)."
        require_no_problems("params", half, "no float16 under loss_scale", advice)
        scale = jnp.asarray(initial_scale, jnp.float32)
        logs = optax.SnapshotState({_LOSS_SCALE: scale})
        return LossScaleState(skipping.init(params), scale, jnp.zeros((), jnp.int32), logs)

    def update(
        updates: PyTree, state: LossScaleState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, LossScaleState]:
        updates, skip = skipping.update(updates, state.skip, params, **extra_args)
        finite_in_a_row = jnp.where(skip.taken, state.finite_in_a_row + 1, 0)
        larger_scale = state.scale * 2
        # An infinite scale would make every later gradient infinite.
        grows = (finite_in_a_row >= growth_interval) & jnp.isfinite(larger_scale)
        scale_if_finite = jnp.where(grows, larger_scale, state.scale)
        smaller_scale = jnp.maximum(state.scale / 2, 1)
        scale = jnp.where(skip.taken, scale_if_finite, smaller_scale)
        finite_in_a_row = jnp.where(finite_in_a_row >= growth_interval, 0, finite_in_a_row)
        # The scale that this update's loss was multiplied by, not the next one.
        logs = optax.SnapshotState({_LOSS_SCALE: state.scale})
        return updates, LossScaleState(skip, scale, finite_in_a_row, logs)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_loss(loss: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns the loss times the scale, `f32[]` or wider; the loss unchanged without a scale."""
    if scale is None:
        return loss
    # The largest float16 is 65504: the scale itself may be larger, and the product soon is.
    wide_loss = _tree.at_least_float32(loss)
    return wide_loss * scale.astype(wide_loss.dtype)


def unscale_gradients(grads: PyTree, scale: jax.Array | None) -> PyTree:
    """Returns the gradients divided by the scale, in their dtypes; unchanged without a scale."""
    if scale is None:
        return grads

    def unscale(x: jax.Array) -> jax.Array:
        # As above, the scale may be infinite in float16.
        wide = _tree.at_least_float32(x)
        return (wide / scale.astype(wide.dtype)).astype(x.dtype)

    return jax.tree.map(unscale, grads)


def taken_and_scale(opt_state: PyTree) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the flag of the last update, `bool[]`, False if skipped, and the scale of the next.

    The flag is None without a transformation that skips, the scale without `loss_scale`.

    Raises:
      ValueError: A guard wraps only a part of the optimizer.
    """
    is_scaled = isinstance(opt_state, LossScaleState)
    skip = opt_state.skip if is_scaled else opt_state
    is_skipping = isinstance(skip, SkipState)
    # A guard around a part would leave the rest of the optimizer with a step that was skipped.
    if _tree.nodes(skip.inner if is_skipping else skip, SkipState, LossScaleState):
        raise ValueError(
            "tx: expected one of skip_non_finite, skip_spikes and loss_scale, around the whole "
            "optimizer, got one inside of another transformation. Write "
            "functrain.tx.skip_non_finite(optax.chain(...)), around MultiSteps as well."
        )
    return skip.taken if is_skipping else None, opt_state.scale if is_scaled else None
