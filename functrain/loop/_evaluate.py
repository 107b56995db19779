"""Measures a state on data."""

from collections.abc import Callable
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._log_values import to_values
from functrain.common._types import PyTree
from functrain.engine import _placement
from functrain.engine._driver import Driver, copy_arrays
from functrain.engine._guards import tracing_guards
from functrain.engine._plan import FuseArg, Plan, chunks
from functrain.engine._processes import require_same_run
from functrain.engine._programs import (
    Kind,
    cached_program,
    compute_metrics,
    initial_metrics,
    metric_names,
)
from functrain.engine._signals import DeferredSignals
from functrain.loop._arguments import RunArguments, pass_arguments
from functrain.loop._finite import warn_of_loss
from functrain.loop._require import require_batches, require_constant, require_eval_step
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
    require_constant(state)
    evaluation = Evaluation(step, data, fuse=fuse, rewrites=rewrites, sharding=sharding, jit=jit)
    evaluation.require_same_in_processes()
    values = evaluation.measure(state)
    evaluation.warn_of_loss(values, state)
    return values


class Evaluation:
    """The arguments of an evaluation except for the state, checked once; those of `evaluate`."""

    def __init__(self, step: MeteredStep, data: Any, **options: Any) -> None:
        require_eval_step(step)
        # Raises an error for metrics whose values are no scalars.
        metric_names(step)
        self.step, self.arguments = step, pass_arguments(data, **options)
        self.batches = self.arguments.batches
        step.require_data(self.batches.data, self.batches.name)

    def require_same_in_processes(self) -> None:
        """Raises ValueError unless all processes have the same data and arguments."""
        arguments = self.arguments
        require_same_run(self.batches, arguments.sharding, fuse=arguments.fuse)

    def trace(self, state: PyTree, *, can_trace: bool = True) -> frozenset[str]:
        """Traces the step with the first batch, so that its errors surface at once.

        Nothing is computed, and a signature is traced only once. If the data can be iterated only
        once, the next evaluation continues the pass whose first batch was fetched here.

        Args:
          state: A state, or its shapes.
          can_trace: False only looks for a batch.

        Returns:
          The names of the values.
        """
        batch = self.batches.first()
        require_batches(int(batch is not None), name=self.batches.name)
        if not (self.arguments.jit and can_trace):
            return metric_names(self.step)
        shapes = [batch]
        if self.arguments.sharding is not None:
            # A step may divide batches itself, as with jax.shard_map, and fail for a smaller last
            # one.
            shapes += self.batches.known_shapes()
        try:
            for shape in shapes:
                _trace(self.step, state, shape)
        except Exception as error:
            error.add_note(
                f"The error was raised while the evaluation of {self.batches.name} was traced, "
                "before the first step."
            )
            raise
        return metric_names(self.step)

    def measure(self, state: PyTree) -> dict[str, Any]:
        """Returns the values of the metrics over all of the data."""
        step, batches, signals = self.step, self.batches, DeferredSignals()
        metrics = _placement.replicate_beside(copy_arrays(initial_metrics(step, state)), state)
        driver = begin_pass(step, EVALUATION, self.arguments, state, metrics)
        plan = Plan(
            self.arguments.fuse,
            intervals=lambda batch: [batches.full_steps],
            chip=accelerator_of(state),
        )
        steps = 0
        for chunk in chunks(batches, plan):
            driver.run(chunk)
            steps += chunk.steps
            # Of a fit, one of whose hooks this is.
            signals.handle_pending()
        require_batches(steps, name=batches.name)
        return to_values(compute_metrics(step, driver.carry))

    def warn_of_loss(self, values: dict[str, Any], state: PyTree) -> bool:
        """Warns if the loss is not finite; returns True if it has warned."""
        return warn_of_loss(values, state.active if self.step.is_population else None)


def begin_pass(
    step: Any, kind: Kind, arguments: RunArguments, state: PyTree, carry: PyTree
) -> Driver:
    """Begins a pass over data that leaves the state alone; returns the driver for its chunks."""
    sharding, put_chunk = arguments.sharding, None
    if sharding is not None:
        # Padding and masking would not do: a loss returns only the mean over its batch, from which
        # the padding cannot be removed, and batch statistics or contrastive losses depend on the
        # whole batch. Computed whole on every device, the last batch is exact for every loss.
        put_chunk = _placement.chunk_placer(sharding, replicates=True)
        carry, state = _placement.place_on_mesh((carry, state), sharding)
    driver = Driver(step, kind, rewrites=arguments.rewrites, jit=arguments.jit, put_chunk=put_chunk)
    driver.begin(carry, state)
    arguments.batches.begin(0)
    return driver


def _trace(step: MeteredStep, state: PyTree, batch: PyTree) -> None:
    """Traces a step, unless it was traced with these shapes before."""

    def build(get_step: Callable[[], MeteredStep]) -> Callable[[], None]:
        abstract_state = _placement.abstract_on_mesh(state, None)
        with tracing_guards():
            jax.eval_shape(lambda s, x: step(step.start(s), x), abstract_state, _tree.shapes(batch))
        # What is cached is that there was no error.
        return lambda: None

    cached_program(step, ("trace", _tree.signature(state), _tree.signature(batch)), build)
