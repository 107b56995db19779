"""Passes over data that leave the state alone: evaluate and predict."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._arguments import describe_signature
from functrain.common._checks import require, require_no_problems
from functrain.common._gather import fetch_global
from functrain.common._log_values import to_values
from functrain.common._types import PyTree, Step
from functrain.common._warnings import warn
from functrain.data._batches import Batches, Chunk, example_count
from functrain.data._loader import ArrayLoader
from functrain.engine import _placement
from functrain.engine._driver import Driver
from functrain.engine._guards import tracing_guards
from functrain.engine._plan import PREDICTING_PROGRAMS, FuseArg, Plan, chunks, nbytes
from functrain.engine._programs import (
    Kind,
    cached_program,
    compute_metrics,
    initial_metrics,
    metric_names,
)
from functrain.engine._signals import DeferredSignals
from functrain.loop._arguments import (
    RunArguments,
    pass_arguments,
    require_batches,
    require_constant,
)
from functrain.loop._events import fetch_rows
from functrain.metrics._metric import Metered
from functrain.rewrites import Mode
from functrain.rewrites._compile import jit as jit_program
from functrain.step._eval import check_predict_step
from functrain.step._metered import MeteredStep
from functrain.targets._chips import Chip, accelerator_of

# The state is a constant beside the carry, which holds metrics or nothing: it is neither copied nor
# returned.
EVALUATION = Kind(
    "evaluate",
    lambda step: (
        lambda metrics, batch, state: (step(Metered(state, metrics), batch)[0].metrics, ())
    ),
)
PREDICTION = Kind(
    "predict", lambda step: lambda nothing, batch, state: (nothing, step(state, batch)[1])
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
      rewrites: As for `functrain.fuse`.
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
    return evaluation.measure(state)


class Evaluation:
    """The arguments of an evaluation except for the state, checked once; those of `evaluate`."""

    def __init__(self, step: MeteredStep, data: Any, **options: Any) -> None:
        if not isinstance(step, MeteredStep) or step.trains:
            trains = isinstance(step, MeteredStep)
            got = "a step that trains" if trains else describe_signature(step)
            raise TypeError(
                f"eval_step: expected a step from functrain.eval_step(loss_fn, ...), got {got}."
            )
        # Raises an error for metrics whose values are no scalars.
        metric_names(step)
        self.step, self.arguments = step, pass_arguments(data, **options)
        self.batches = self.arguments.batches
        step.require_data(self.batches.data, self.batches.name)

    def trace(self, state: PyTree, *, can_trace: bool = True) -> frozenset[str]:
        """Traces the step with the first batch.

        A signature is traced only once. If the data can be iterated only once, the next evaluation
        continues the pass whose first batch was fetched here.

        Args:
          state: A state, or its shapes.
          can_trace: False only looks for a batch.

        Returns:
          The names of the values.
        """
        batch = self.batches.first()
        require_batches(int(batch is not None), name=self.batches.name)
        names = metric_names(self.step)
        if not (self.arguments.jit and can_trace):
            return names
        # What is cached is that there was no error.
        key = "trace", _tree.signature(state), _tree.signature(batch)
        try:
            cached_program(self.step, key, lambda get: _trace(get(), state, batch))
        except Exception as error:
            error.add_note(
                f"The error was raised while the evaluation of {self.batches.name} was traced, "
                "before the first step."
            )
            raise
        return names

    def measure(self, state: PyTree) -> dict[str, Any]:
        """Returns the values of the metrics over all data; warns of a loss that is not finite."""
        step, batches = self.step, self.batches
        metrics = _placement.replicate_beside(initial_metrics(step, state)(), state)
        driver = _begin_pass(step, EVALUATION, self.arguments, state, metrics)
        # The programs change the metrics only, which are small.
        plan = self.arguments.new_plan(state, carry_bytes=0)
        for _ in _run_pass(driver, batches, plan):
            pass
        values = to_values(compute_metrics(step, driver.carry))
        is_bad = ~np.isfinite(values.get("loss", 0.0))
        # A member may have been stopped because it diverged.
        if step.is_population:
            is_bad = is_bad & fetch_global(state.active)
        if is_bad.any():
            members = f" of members {np.flatnonzero(is_bad).tolist()}" if is_bad.ndim else ""
            warn(
                f"evaluate: expected a finite loss, got NaN or infinity{members}. To find the "
                "first batch that has it, evaluate them one by one, functrain.evaluate(state, "
                "step, [batch]); functrain.inspect.explain_nan(state, step, batch) names the "
                "operation that made it."
            )
        return values


def predict(
    state: PyTree,
    step: Step[Any],
    data: Any,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
    sharding: _placement.ShardingArg = None,
    jit: bool = True,
) -> PyTree:
    """Returns the outputs for all of the data, in its order, in host memory.

    If a batch does not divide over the devices, such as a smaller last one, every device computes
    all of it.

    Args:
      state: The state; neither changed nor consumed.
      step: A step from `predict_step`.
      data: Batches of inputs alone: ``ArrayLoader(x, batch_size)`` without shuffling, or an
        iterable.
      fuse: Batches per program.
      rewrites: As for `functrain.fuse`.
      sharding: The sharding of one batch, as for `run`.
      jit: False runs uncompiled, for debugging, as in `run`.

    Returns:
      NumPy arrays `[N, ...]` in the outputs' structure.

    Raises:
      TypeError: The step has metrics, or `state` is not a state.
      ValueError: The loader shuffles or drops examples, or there are no batches, or an output does
        not have one row for each example, or other shapes than those of the batches before.

    Examples:
      >>> import numpy as np
      >>> from functrain import ArrayLoader
      >>> def step(state, x):
      ...     return state, x * state
      >>> predict(2.0, step, ArrayLoader(np.arange(5.0), batch_size=2))
      array([0., 2., 4., 6., 8.], dtype=float32)
    """
    require_constant(state)
    check_predict_step(step)
    arguments = pass_arguments(data, fuse=fuse, rewrites=rewrites, sharding=sharding, jit=jit)
    batches = arguments.batches
    shuffles = isinstance(batches.data, ArrayLoader) and batches.data.shuffle
    expected = "all of the data in order, from a loader with shuffle=False"
    require(not shuffles, batches.name, expected, batches.data)
    driver = _begin_pass(step, PREDICTION, arguments, state, ())
    plan = prediction_plan(
        fuse,
        batches,
        row_bytes=lambda batch: _row_bytes(step, state, batch) if jit else 0,
        chip=accelerator_of(state),
    )

    def dispatched() -> Iterator[tuple[PyTree, int]]:
        for chunk, rows in _run_pass(driver, batches, plan):
            _require_examples(rows, chunk)
            yield rows, chunk.steps

    return fetch_outputs(dispatched())


def _begin_pass(
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
    return driver


def _run_pass(driver: Driver, batches: Batches, plan: Plan) -> Iterator[tuple[Chunk, PyTree]]:
    """Yields each chunk of a pass with its rows, after its program was dispatched."""
    signals, steps = DeferredSignals(), 0
    for chunk in chunks(batches, plan):
        yield chunk, driver.run(chunk)
        steps += chunk.steps
        # Of a fit, one of whose hooks this is.
        signals.handle_pending()
    require_batches(steps, name=batches.name)


def prediction_plan(
    fuse: FuseArg,
    batches: Batches,
    *,
    row_bytes: Callable[[PyTree], int],
    chip: Chip | None,
    state_bytes: int = 0,
) -> Plan:
    """Returns the plan of a prediction, which needs several programs, and room for all outputs."""

    def intervals() -> list[int | None]:
        steps = batches.full_steps
        if fuse == "auto" and steps is not None:
            steps = max(1, steps // PREDICTING_PROGRAMS)
        return [steps]

    # The outputs of all K batches are in memory at once, beside the inputs.
    return Plan(fuse, state_bytes, row_bytes, intervals, chip)


def fetch_outputs(dispatched: Iterable[tuple[PyTree, int]]) -> PyTree | None:
    """Returns the outputs of chunks of some steps on the host, `[N, ...]`; None without chunks."""
    parts: list[PyTree] = []
    previous: tuple[PyTree, int] | None = None
    # The outputs of a chunk are fetched when the next one has been dispatched, so that the device
    # is busy meanwhile.
    for chunk in itertools.chain(dispatched, [None]):
        if previous is not None:
            parts.append(jax.tree.map(_merge_batches, fetch_rows(*previous)))
        previous = chunk
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts) if parts else None


def _merge_batches(x: np.ndarray) -> np.ndarray:
    """Merges the axes of steps and examples: `[steps, B, ...]` becomes `[steps * B, ...]`."""
    if x.ndim < 2:
        raise ValueError(
            "outputs: expected one per example, [B, ...], got a scalar per batch. Make it a metric."
        )
    return x.reshape(len(x) * x.shape[1], *x.shape[2:])


def _trace(step: MeteredStep, state: PyTree, batch: PyTree) -> None:
    """Traces an evaluation step with a state and a batch, or their shapes."""
    abstract_state = _placement.abstract_on_mesh(state, None)
    with tracing_guards():
        jax.eval_shape(lambda s, x: step(step.start(s), x), abstract_state, _tree.shapes(batch))


def _row_bytes(step: Step[Any], state: PyTree, batch: PyTree) -> int:
    """Returns the size of the outputs of a batch."""
    # Cached: tracing MobileNetV2 took 0.3 s at every call of predict.
    outputs: Any = cached_program(
        step, "outputs", lambda get: jit_program(lambda s, x: get()(s, x)[1])
    )
    with tracing_guards():
        return nbytes(outputs.eval_shape(state, batch))


def _require_examples(rows: PyTree, chunk: Chunk) -> None:
    """Raises ValueError unless the outputs of a chunk, `[k, B, ...]`, have one row an example."""
    # The outputs must at least agree if the batch does not tell how many examples it has.
    count = example_count(chunk.batches, 1) or example_count(rows, 1)
    lines = [
        f"{path}: {_tree.format_spec(x.dtype, x.shape[1:])}"
        for path, x in _tree.leaves_with_path(rows)
        if x.shape[1:2] != (count,)
    ]
    expected = f"one row for each example of a batch, [{'B' if count is None else count}, ...]"
    advice = (
        "They are joined along the examples: return what belongs to a whole batch from a step of "
        "`run`, whose events have it as `rows`. To predict, pass functrain.predict_step(model)."
    )
    require_no_problems("outputs", lines, expected, advice)
