"""Measurement of how many steps to fuse."""

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._checks import is_integer, require
from functrain.common._gather import gather_from_processes
from functrain.common._types import PyTree, Step, traits_of
from functrain.data._batch import require_batch
from functrain.engine import _fuse, _placement
from functrain.engine._driver import RUN_AHEAD
from functrain.engine._guards import tracing_guards
from functrain.engine._plan import nbytes
from functrain.rewrites import Mode
from functrain.rewrites._compile import jit
from functrain.step._check import check_step

ROUNDS = 5
# How long each candidate runs in a round.
ROUND_SECONDS = 0.1
# Differences below 3 % are noise: the smaller K wins.
TOLERANCE = 1.03


class TuningRow(NamedTuple):
    """The measurement of one candidate.

    Attributes:
      k: Steps per program; 0 is plain `jax.jit` of the step, dispatched one by one.
      microseconds: Time per step, the median of the rounds.
      compile_seconds: Time of the first call minus the time of a later one.
      chunk_bytes: Bytes of the K batches of a program.

    Examples:
      >>> TuningRow(k=32, microseconds=11.0, compile_seconds=0.4, chunk_bytes=262_144).k
      32
    """

    k: int
    microseconds: float
    compile_seconds: float
    chunk_bytes: int


class Tuning(NamedTuple):
    """The result of `autotune`; prints as a table.

    Attributes:
      k: The best number of steps per program, for ``fit(fuse=...)``.
      rows: The measurements.

    Examples:
      >>> print(Tuning(k=8, rows=(TuningRow(8, 11.0, 0.4, 65_536),)))
      fuse   µs/step  compile s  chunk MiB
         8*     11.0        0.4        0.1
    """

    k: int
    rows: tuple[TuningRow, ...]

    def __repr__(self) -> str:
        """Returns the table; a star marks the best K, and `jit` is the plain step."""
        lines = ["fuse   µs/step  compile s  chunk MiB"]
        for row in self.rows:
            name = f"{row.k or 'jit':>4}{'*' if row.k == self.k else ' '}"
            mebibytes = row.chunk_bytes / 2**20
            lines.append(
                f"{name}{row.microseconds:9.1f}{row.compile_seconds:11.1f}{mebibytes:11.1f}"
            )
        return "\n".join(lines)


def autotune(
    state: PyTree,
    step: Step[Any],
    batch: PyTree,
    *,
    fuse: Sequence[int] = (1, 4, 16, 64),
    seconds: float = 30.0,
    memory: int = 2**28,
    rewrites: Mode = "auto",
    sharding: _placement.ShardingArg = None,
) -> Tuning:
    """Measures the time of a step alone and fused, and chooses the number of steps per program.

    Each K costs a compilation and about half a second of steps; `seconds` bounds the total. The
    state is copied, so it is not consumed, and the trained copy is discarded.

    Args:
      state: The state to start from; neither changed nor consumed. For a step with metrics, with or
        without them.
      step: ``(state, batch) -> (state, logs)``, as for `fit`.
      batch: One batch of full size.
      fuse: The numbers of steps per program to try, in rising order.
      seconds: No further K is tried after this time. The first is always measured.
      memory: A K whose chunk has more bytes than this is not tried, except for the first.
      rewrites: As for `functrain.fuse`.
      sharding: The sharding of one batch, as for `functrain.run`. If there are several processes,
        all follow the clock of the first and choose the same K.

    Returns:
      A `Tuning`: K and the measurements. K is the smallest within 3 % of the fastest K. The plain
      `jax.jit` is not chosen, since `fit` runs a loop for K = 1 too, but its time is in the rows.

    Raises:
      ValueError: `fuse` is empty, not rising, or has a number below 1.
      TypeError: `step` is a loss, or not a function.

    Examples:
      >>> import jax.numpy as jnp
      >>> def step(state, batch):
      ...     return state + jnp.mean(batch), {}
      >>> tuning = autotune(jnp.zeros(()), step, jnp.ones(8), fuse=(1, 16))
      >>> [row.k for row in tuning.rows]
      [0, 1, 16]
      >>> tuning.k in (1, 16)
      True
    """
    ks = list(fuse) if isinstance(fuse, Sequence) else []
    are_rising = all(is_integer(k, 1) for k in ks) and all(a < b for a, b in itertools.pairwise(ks))
    advice = "For one number, write fuse=(16,)."
    require(ks and are_rising, "fuse", "rising numbers of steps of at least 1", fuse, advice)
    check_step(step)
    require_batch(batch)
    # Placed like the state and the batches of a run, so that the same programs are measured.
    target = _placement.batch_sharding(sharding)
    carry = _placement.place_on_mesh(traits_of(step).wrap_state(state), target)
    batch = jax.tree.map(jnp.asarray, batch)
    batch_bytes = nbytes(batch)
    start_time = time.perf_counter()
    candidates = [Candidate(0, _jitted(step, carry), carry, _placement.place_batch(batch, target))]
    place_chunk = _placement.chunk_placer(target)
    for k in ks:
        elapsed = _of_first_process(time.perf_counter() - start_time, carry)
        if k != ks[0] and (k * batch_bytes > memory or elapsed > seconds):
            break
        # The same batch K times: the time of a step does not depend on the values.
        chunk = place_chunk(jax.tree.map(lambda x, k=k: jnp.stack([x] * k), batch))
        candidates.append(Candidate(k, _fuse.fuse(step, k, rewrites=rewrites), carry, chunk))
    rows = tuple(_of_first_process(measure(candidates), carry))
    return Tuning(_choose(rows), rows)


def _choose(rows: Sequence[TuningRow]) -> int:
    """Returns the smallest K that is as fast as the fastest K, up to noise."""
    # Without the plain step: `fit` runs the program with a loop for K = 1 too, so that its results
    # do not depend on K.
    fused = [row for row in rows if row.k]
    fastest = min(row.microseconds for row in fused)
    return next(row.k for row in fused if row.microseconds <= fastest * TOLERANCE)


def _of_first_process(value: Any, carry: PyTree) -> Any:
    """Returns the first process's value if a state is spread over several processes."""
    # Their programs communicate, so all processes must run the same ones equally often.
    leaves = jax.tree.leaves(carry)
    is_local = all(getattr(x, "is_fully_addressable", True) for x in leaves)
    return value if is_local else gather_from_processes(value)[0]


def _jitted(step: Any, carry: PyTree) -> Any:
    """Returns the plain jitted step, which keeps the shardings of the state."""
    pins = _placement.read_pins(carry)

    def guarded_step(state: PyTree, batch: PyTree) -> Any:
        with tracing_guards(step):
            return _placement.pin_carry(step(state, batch), pins)

    return jit(guarded_step, donate_argnums=0)


class Candidate:
    """A compiled program that takes `k` steps per call, with its own copy of the state."""

    def __init__(self, k: int, program: Any, state: PyTree, batches: PyTree) -> None:
        self.k, self._program, self.batches = k, program, batches
        self._state = _tree.copy(state)
        leaves = jax.tree.leaves(self._state)
        self._uses_several_devices = any(len(x.sharding.device_set) > 1 for x in leaves)
        # The first call compiles; the difference to a later one is the time of compilation.
        first_call = self._seconds(1)
        later_call: float = _of_first_process(self._seconds(1), state)
        self.compile_seconds = first_call - later_call
        self._calls = max(1, round(ROUND_SECONDS / max(later_call, 1e-7)))

    def _seconds(self, calls: int) -> float:
        """Returns the time of some calls."""
        start_time = time.perf_counter()
        for i in range(calls):
            self._state, _ = self._program(self._state, self.batches)
            # Programs on several CPU devices hang if many of them are queued.
            if self._uses_several_devices and i % RUN_AHEAD == 0:
                jax.block_until_ready(self._state)
        jax.block_until_ready(self._state)
        return time.perf_counter() - start_time

    def microseconds(self) -> float:
        """Returns the time of a step, measured in one round."""
        # The plain step has k = 0, and takes one step per call.
        return 1e6 * self._seconds(self._calls) / self._calls / max(1, self.k)


def measure(candidates: Sequence[Candidate]) -> list[TuningRow]:
    """Returns the time per step of each candidate."""
    # They take turns, so that a slow moment of the machine affects all of them.
    rounds = [[candidate.microseconds() for candidate in candidates] for _ in range(ROUNDS)]
    medians = map(statistics.median, zip(*rounds, strict=True))
    rows = []
    for x, median in zip(candidates, medians, strict=True):
        rows.append(TuningRow(x.k, median, x.compile_seconds, nbytes(x.batches)))
    return rows
