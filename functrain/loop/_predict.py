"""Collects a model's outputs on data."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._types import PyTree, Step
from functrain.data._batch import example_count
from functrain.data._batches import Batches, Chunk
from functrain.data._loader import ArrayLoader
from functrain.engine import _placement
from functrain.engine._guards import tracing_guards
from functrain.engine._plan import FuseArg, Plan, chunks, nbytes, prediction_interval
from functrain.engine._processes import require_same_run
from functrain.engine._programs import Kind, cached_program
from functrain.engine._signals import DeferredSignals
from functrain.loop._arguments import pass_arguments
from functrain.loop._evaluate import begin_pass
from functrain.loop._events import fetch_rows
from functrain.loop._require import require_batches, require_constant
from functrain.rewrites import Mode
from functrain.rewrites._compile import jit
from functrain.step._eval import check_predict_step
from functrain.targets._chips import Chip, accelerator_of

# The carry is empty, and the state a constant beside it: it is neither copied nor returned.
PREDICTION = Kind(
    "predict", lambda step: lambda nothing, batch, state: (nothing, step(state, batch)[1])
)


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
      rewrites: As for `fuse`.
      sharding: The sharding of one batch, as for `run`.
      jit: False runs uncompiled, for debugging, as in `run`.

    Returns:
      NumPy arrays `[N, ...]` in the outputs' structure.

    Raises:
      TypeError: The step has metrics, or `state` is not a state.
      ValueError: The loader shuffles or drops examples, or there are no batches, or an output does
        not have one row for each example, or has another shape than that of the first batch.

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
    require_same_run(batches, arguments.sharding, fuse=fuse)
    driver = begin_pass(step, PREDICTION, arguments, state, ())
    plan = prediction_plan(
        fuse,
        batches,
        row_bytes=lambda batch: _row_bytes(step, state, batch) if jit else 0,
        chip=accelerator_of(state),
    )
    signals = DeferredSignals()

    def dispatched() -> Iterator[tuple[PyTree, int]]:
        first = None
        for chunk in chunks(batches, plan):
            rows = driver.run(chunk)
            _require_examples(rows, chunk)
            shapes = jax.tree.map(lambda x: x.shape[2:], rows)
            first = shapes if first is None else first
            expected = f"{first} for each example of all batches"
            advice = "Let the step pad them, or predict the batches of each shape on their own."
            require(shapes == first, "outputs", expected, shapes, advice)
            yield rows, chunk.steps
            # Of a fit, one of whose hooks this is.
            signals.handle_pending()

    # Outputs are fetched in order, while later chunks are computed.
    parts = fetch_outputs(dispatched())
    require_batches(len(parts))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def prediction_plan(
    fuse: FuseArg,
    batches: Batches,
    *,
    row_bytes: Callable[[PyTree], int],
    chip: Chip | None,
    state_bytes: int = 0,
) -> Plan:
    """Returns the plan of a prediction, which needs several programs, and room for all outputs."""
    return Plan(
        fuse,
        state_bytes=state_bytes,
        # The outputs of all K batches are in memory at once, beside the inputs.
        row_bytes=row_bytes,
        intervals=lambda batch: [
            prediction_interval(batches.full_steps) if fuse == "auto" else batches.full_steps
        ],
        chip=chip,
    )


def fetch_outputs(dispatched: Iterable[tuple[PyTree, int]]) -> list[PyTree]:
    """Returns the outputs of the steps of each chunk on the host: leaves `[steps * B, ...]`.

    Args:
      dispatched: The rows of each chunk, and the number of its steps.

    Raises:
      ValueError: An output is a scalar.
    """
    parts: list[PyTree] = []
    previous: tuple[PyTree, int] | None = None
    # The outputs of a chunk are fetched when the next one has been dispatched, so that the device
    # is busy meanwhile.
    for chunk in dispatched:
        if previous is not None:
            parts.append(jax.tree.map(_merge_batches, fetch_rows(*previous)))
        previous = chunk
    if previous is not None:
        parts.append(jax.tree.map(_merge_batches, fetch_rows(*previous)))
    return parts


def _merge_batches(x: np.ndarray) -> np.ndarray:
    """Merges the axes of steps and examples: `[steps, B, ...]` becomes `[steps * B, ...]`."""
    if x.ndim < 2:
        raise ValueError(
            "outputs: expected one per example, [B, ...], got a scalar per batch. Return what "
            "belongs to a whole batch in another way, such as by a metric."
        )
    return x.reshape(len(x) * x.shape[1], *x.shape[2:])


def _row_bytes(step: Step[Any], state: PyTree, batch: PyTree) -> int:
    """Returns the size of the outputs of a batch."""
    # Cached: tracing MobileNetV2 took 0.3 s at every call of predict.
    outputs: Any = cached_program(step, "outputs", lambda get: jit(lambda s, x: get()(s, x)[1]))
    with tracing_guards():
        return nbytes(outputs.eval_shape(state, batch))


def _require_examples(rows: PyTree, chunk: Chunk) -> None:
    """Raises ValueError unless the outputs of a chunk, `[k, B, ...]`, have one row an example."""
    # The outputs must at least agree if the batch does not tell how many examples it has.
    count = example_count(chunk.batches, 1) or example_count(rows, 1)
    lines = [
        f"{path}: {_tree.format_spec(x.dtype, x.shape[1:])}"
        for path, x in _tree.leaves_with_path(rows)
        if x.ndim < 2 or x.shape[1] != count
    ]
    require_no_problems(
        "outputs",
        lines,
        f"one row for each example of a batch, [{'B' if count is None else count}, ...]",
        "They are joined along the examples: return what belongs to a whole batch from a step of "
        "`run`, whose events have it as `rows`. The logs of a training step are scalars: pass "
        "functrain.predict_step(model) to predict.",
    )
