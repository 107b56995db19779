"""Measures how many steps to fuse."""

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._compile import jit
from functrain.common._gather import gather_from_processes
from functrain.common._types import PyTree, Step, traits_of
from functrain.data._batch import require_batch
from functrain.engine import _fuse, _placement
from functrain.engine._driver import RUN_AHEAD
from functrain.engine._guards import tracing_guards
from functrain.engine._plan import nbytes
from functrain.rewrites import Mode
from functrain.step._check import check_step

ROUNDS = 5
ROUND_SECONDS = 0.1  # how long each way runs in a round, once it is known how fast it is
TOLERANCE = 1.03  # differences below this are noise: the smaller K wins


class TuningRow(NamedTuple):
    """The measurement of one way of taking steps.

    Attributes:
      k: Steps per program; 0 is plain `jax.jit` of the step, dispatched one by one.
      microseconds: Per step, the median of the rounds.
      compile_seconds: Time of the first call, less that of a later one.
      chunk_bytes: Bytes of the K batches that are in memory at once.

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
      k: The choice, for ``fit(fuse=...)``.
      rows: The measurements.

    Examples:
      >>> print(Tuning(k=8, rows=(TuningRow(8, 11.0, 0.4, 65_536),)))
         K   µs/step  compile s  chunk MiB
         8*     11.0        0.4        0.1
    """

    k: int
    rows: tuple[TuningRow, ...]

    def __repr__(self) -> str:
        """Returns the table; a star marks the choice, `jit` the plain step."""
        lines = ["   K   µs/step  compile s  chunk MiB"]
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
    """Measures how long a step takes alone and fused, and chooses K.

    Each K costs a compilation and about half a second of steps; `seconds` bounds the sum. The
    state is copied, so nothing is consumed, and the steps that are taken are forgotten.

    Args:
      state: The state to start from; neither changed nor consumed. For a step with metrics, bare
        or started.
      step: ``(state, batch) -> (state, logs)``, as for `fit`.
      batch: One batch, of full size.
      fuse: The numbers of steps to try, in rising order.
      seconds: After so much time no further K is tried. The first is always measured.
      memory: A K whose chunk is larger than so many bytes is not tried, the first excepted.
      rewrites: As for `fuse`.
      sharding: Of the batch, as for `functrain.run`. Several processes try the same, as often as
        the first of them says, and choose what it chooses.

    Returns:
      The choice and the table. It is the smallest K within 3 % of the fastest, and 1 where plain
      `jax.jit` beats every K by more than that.

    Raises:
      ValueError: `fuse` is empty, or does not rise from 1 or more.
      TypeError: `step` is a loss, or no function.

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
    ks = list(fuse)
    if not ks or ks[0] < 1 or any(a >= b for a, b in itertools.pairwise(ks)):
        raise ValueError(f"fuse: expected rising numbers of steps from 1 on, got {ks}")
    check_step(step)
    require_batch(batch)
    target = _placement.batch_sharding(sharding)
    carry = _placement.place_on_mesh(traits_of(step).wrap_state(state), target)
    batch = jax.tree.map(jnp.asarray, batch)
    batch_bytes = nbytes(batch)
    began = time.perf_counter()
    candidates = [Candidate(0, _jitted(step, carry), carry, _placement.place_batch(batch, target))]
    place_chunk = _placement.chunk_placer(target)
    for k in ks:
        passed = _of_first_process(time.perf_counter() - began, carry)
        if k != ks[0] and (k * batch_bytes > memory or passed > seconds):
            break
        chunk = place_chunk(jax.tree.map(lambda x, k=k: jnp.stack([x] * k), batch))
        candidates.append(Candidate(k, _fuse.fuse(step, k, rewrites=rewrites), carry, chunk))
    rows = tuple(_of_first_process(measured(candidates), carry))
    return Tuning(_choose(rows), rows)


def _choose(rows: Sequence[TuningRow]) -> int:
    alone, *fused = rows
    fastest = min(row.microseconds for row in fused)
    if alone.microseconds * TOLERANCE < fastest:
        return 1
    return next(row.k for row in fused if row.microseconds <= fastest * TOLERANCE)


def _of_first_process(value: Any, carry: PyTree) -> Any:
    """Returns the value of the first process where several hold a state: all must do the same."""
    is_whole_here = all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(carry))
    return value if is_whole_here else gather_from_processes(value)[0]


def _jitted(step: Any, carry: PyTree) -> Any:
    pins = _placement.read_pins(carry)

    def guarded_step(state: PyTree, batch: PyTree) -> Any:
        with tracing_guards(step):
            return _placement.pin_carry(step(state, batch), pins)

    return jit(guarded_step, donate_argnums=0)


class Candidate:
    """A compiled way of taking `k` steps a call, with its own copy of the state."""

    def __init__(self, k: int, program: Any, state: PyTree, batches: PyTree) -> None:
        self.k, self._program, self.batches = k, program, batches
        self._state = _tree.copy(state)
        leaves = jax.tree.leaves(self._state)
        self._is_on_several = any(len(x.sharding.device_set) > 1 for x in leaves)
        first_call = self._seconds(1)
        later_call: float = _of_first_process(self._seconds(1), state)
        self.compile_seconds = first_call - later_call
        self._calls = max(1, round(ROUND_SECONDS / max(later_call, 1e-7)))

    def _seconds(self, calls: int) -> float:
        began = time.perf_counter()
        for number in range(calls):
            self._state, _ = self._program(self._state, self.batches)
            # With many programs queued, programs on several CPU devices hang.
            if self._is_on_several and number % RUN_AHEAD == 0:
                jax.block_until_ready(self._state)
        jax.block_until_ready(self._state)
        return time.perf_counter() - began

    def microseconds(self) -> float:
        """Returns the time of a step, measured in one round."""
        return 1e6 * self._seconds(self._calls) / self._calls / max(1, self.k)


def measured(candidates: Sequence[Candidate]) -> list[TuningRow]:
    """Times the candidates in turn, so that a slow moment of the machine slows all of them."""
    rounds = [[candidate.microseconds() for candidate in candidates] for _ in range(ROUNDS)]
    medians = map(statistics.median, zip(*rounds, strict=True))
    return [
        TuningRow(x.k, median, x.compile_seconds, nbytes(x.batches))
        for x, median in zip(candidates, medians, strict=True)
    ]
