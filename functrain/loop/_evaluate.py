"""Measures a state on data."""

from typing import Any

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.common._values import to_values
from functrain.data._adapt import as_batches
from functrain.engine import _placement
from functrain.engine._chunks import chunks
from functrain.engine._driver import Driver
from functrain.engine._plan import FuseArg, Plan
from functrain.engine._programs import Kind, compute_metrics
from functrain.engine._signals import DeferredSignals
from functrain.loop._finite import warn_of_loss
from functrain.loop._require import (
    require_all_examples,
    require_batches,
    require_eval_step,
    require_state,
)
from functrain.metrics._metric import Metered
from functrain.rewrites import Mode
from functrain.step._metered import MeteredStep
from functrain.targets._chips import accelerator_of

# The state is a constant beside the carry, not in it: nothing has to be copied or returned.
EVALUATION = Kind(
    "evaluate",
    lambda step: (
        lambda metrics, batch, state: (step(Metered(state, metrics), batch)[0].metrics, ())
    ),
)


def evaluate(
    state: PyTree,
    step: MeteredStep,
    data: Any,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
    sharding: _placement.ShardingArg = None,
    jit: bool = True,
) -> dict[str, Any]:
    """Returns the loss and metrics of a state over all of the data.

    Every example counts once, whatever the batch size and the number of devices. If a batch does
    not divide over the devices, such as a smaller last one, every device computes all of it.

    Args:
      state: The state, as `fit` returns it. Neither changed nor consumed.
      step: A step from `eval_step`.
      data: An `ArrayLoader` or an iterable of batches, as for `run`.
      fuse: Batches per program.
      rewrites: As for `fuse`.
      sharding: The sharding of one batch, as for `run`.
      jit: False runs uncompiled, for debugging, as in `run`.

    Returns:
      ``{"loss": ..., "accuracy": ...}``, the values of the step's metrics: floats, for a population
      `f64[N]`. The names of nested values are joined by ``/``.

    Raises:
      TypeError: The step has no metrics, or trains, or `state` is not a state.
      ValueError: There are no batches, they have other dtypes or ranks than the first, nothing
        tells how many examples a batch has, or the loader drops examples.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> from functrain import ArrayLoader, Aux, TrainState, eval_step
      >>> def loss_fn(params, model_state, batch, *, rng, training):
      ...     return jnp.mean(batch * params["w"]), Aux(model_state)
      >>> state = TrainState.create(params={"w": jnp.ones(())}, tx=optax.sgd(0.1))
      >>> evaluate(state, eval_step(loss_fn), ArrayLoader(np.arange(5.0), batch_size=2))
      {'loss': 2.0}
    """
    values = evaluate_without_warning(
        state, step, data, fuse=fuse, rewrites=rewrites, sharding=sharding, jit=jit
    )
    # The warning shows the line that called evaluate; its decorator is between.
    warn_of_loss(values, active_members(state, step))
    return values


def active_members(state: PyTree, step: MeteredStep) -> Any:
    """Returns `bool[N]`, False for stopped members of a population; None for a single state."""
    return state.active if step.is_population else None


def evaluate_without_warning(
    state: PyTree,
    step: MeteredStep,
    data: Any,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
    sharding: _placement.ShardingArg = None,
    jit: bool = True,
) -> dict[str, Any]:
    """Returns the values of `evaluate`, without its warning about a loss that is not finite."""
    require_state(state)
    require_eval_step(step)
    mesh_sharding = _placement.batch_sharding(sharding)
    batches = as_batches(data)
    step.require_data(batches.data, batches.name)
    require_all_examples(batches)
    _placement.require_same_run(batches, mesh_sharding, fuse=fuse)
    # Padding and masking would not do: a loss returns only the mean over its batch, from which the
    # padding cannot be removed, and batch statistics or contrastive losses depend on the whole
    # batch. Computed whole on every device, the last batch is exact for every loss and metric.
    place = _placement.chunk_placer(mesh_sharding, replicates=True)
    driver = Driver(step, EVALUATION, rewrites=rewrites, jit=jit, place=place)
    metrics = _placement.replicate_beside(step.start(state).metrics, state)
    metrics = _placement.place_on_mesh(metrics, mesh_sharding)
    driver.begin(metrics, _placement.place_on_mesh(state, mesh_sharding))
    steps, signals = 0, DeferredSignals()
    batches.begin(0)
    plan = Plan(fuse, intervals=lambda batch: [batches.full_steps], chip=accelerator_of(state))
    for chunk in chunks(batches, plan):
        driver.run(chunk)
        steps += chunk.steps
        # Of a fit, one of whose hooks this is.
        signals.handle_pending()
    require_batches(steps, name=batches.name)
    values = compute_metrics(step, driver.carry)
    # Members have one value each, which is not a scalar.
    if not step.is_population:
        _tree.require_scalars(values)
    return to_values(values)
