"""Updates that are not finite are skipped."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
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
      tx: All of the optimizer: schedules, clipping, `optax.MultiSteps`, `params_ema`. Nothing goes
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
