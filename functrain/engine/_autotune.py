"""How many steps to fuse: measured."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._compile import jit
from functrain.common._gather import of_each_process
from functrain.common._types import PyTree, Step
from functrain.data._batch import require_batch
from functrain.engine import _placement
from functrain.engine._driver import RUN_AHEAD
from functrain.engine._fuse import fuse
from functrain.engine._guards import guarded
from functrain.rewrites import Mode
from functrain.step._check import check_step

ROUNDS = 5
ROUND_SECONDS = 0.1  # how long each way runs in a round, once it is known how fast it is
TOLERANCE = 1.03  # differences below this are noise: the smaller K wins


class TuningRow(NamedTuple):
    """One way of taking steps, measured.

    Attributes:
      k: Steps per program; 0 is plain `jax.jit` of the step, dispatched one by one.
      microseconds: Per step, the median of the rounds.
      compile_seconds: Time of the first call, less that of a later one.
      chunk_bytes: Of the K batches that are in memory at once.

    Examples:
      >>> TuningRow(k=32, microseconds=11.0, compile_seconds=0.4, chunk_bytes=262_144).k
      32
    """

    k: int
    microseconds: float
    compile_seconds: float
    chunk_bytes: int


class Tuning(NamedTuple):
    """What `autotune` found; prints as a table.

    Attributes:
      k: The choice, for ``fit(fuse=...)``.
      rows: What was measured.

    Examples:
      >>> print(Tuning(k=8, rows=(TuningRow(8, 11.0, 0.4, 65_536),)))
         K   µs/step  compile s  chunk MiB
         8*     11.0        0.4        0.1
    """

    k: int
    rows: tuple[TuningRow, ...]

    def __str__(self) -> str:
        """Returns the table; a star marks the choice, `jit` the plain step."""
        lines = ["   K   µs/step  compile s  chunk MiB"]
        for row in self.rows:
            name = f"{row.k or 'jit'}".rjust(4) + ("*" if row.k == self.k else " ")
            size = row.chunk_bytes / 2**20
            lines.append(
                f"{name}{row.microseconds:9.1f}{row.compile_seconds:11.1f}{size:11.1f}".rstrip()
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def autotune(
    step: Step[Any],
    state: PyTree,
    batch: PyTree,
    *,
    ks: Sequence[int] = (1, 4, 16, 64),
    seconds: float = 30.0,
    memory: int = 2**28,
    rewrites: Mode = "auto",
    sharding: _placement.ShardingArg = None,
) -> Tuning:
    """Measures how long a step takes alone and fused, and chooses K.

    It costs a compilation for each K, and some half a second of steps; `seconds` bounds the sum.
    The state is copied, so that nothing is consumed, and the steps that are taken are forgotten.

    Args:
      step: ``(state, batch) -> (state, logs)``, as for `fit`.
      state: The state to start from; neither changed nor consumed. For a step with metrics, bare
        or started.
      batch: One batch, of full size.
      ks: What to try, in rising order.
      seconds: After so much time no further K is tried. The first is always measured.
      memory: A K whose chunk is larger than so many bytes is not tried, the first excepted.
      rewrites: As for `fuse`.
      sharding: Of the batch, as for `functrain.run`. Several processes try the same, as often as
        the first of them says, and choose what it chooses.

    Returns:
      The choice and the table. It is the smallest K within 3 % of the fastest, and 1 where plain
      `jax.jit` beats every K by more than that.

    Raises:
      ValueError: `ks` is empty, or does not rise from 1 or more.
      TypeError: `step` is a loss, or no function.

    Examples:
      >>> import jax.numpy as jnp
      >>> def step(state, batch):
      ...     return state + jnp.mean(batch), {}
      >>> tuning = autotune(step, jnp.zeros(()), jnp.ones(8), ks=(1, 16))
      >>> [row.k for row in tuning.rows]
      [0, 1, 16]
      >>> tuning.k in (1, 16)
      True
    """
    ks = list(ks)
    if not ks or ks[0] < 1 or any(a >= b for a, b in itertools.pairwise(ks)):
        raise ValueError(f"ks: expected rising numbers of steps from 1 on, got {ks}")
    check_step(step)
    require_batch(batch)
    where = _placement.batch_sharding(sharding)
    carry, batch = getattr(step, "traced_with", lambda *args: args)(state, batch)
    carry = _placement.on_mesh(carry, where)
    size = sum(int(jnp.asarray(x).nbytes) for x in jax.tree.leaves(batch))
    began = time.perf_counter()
    alone = _placement.placed(jax.tree.map(jnp.asarray, batch), where)
    candidates = [Candidate(0, _jitted(step, carry), carry, alone, size)]
    place = _placement.chunk_placement(where)
    for k in ks:
        passed = _of_first(time.perf_counter() - began, carry)
        if k != ks[0] and (k * size > memory or passed > seconds):
            break
        chunk = place(jax.tree.map(lambda x, k=k: jnp.stack([jnp.asarray(x)] * k), batch))
        candidates.append(Candidate(k, fuse(step, k, rewrites=rewrites), carry, chunk, k * size))
    for _ in range(ROUNDS):  # in turn, so that a slow moment of the machine meets all of them
        for candidate in candidates:
            candidate.measure()
    rows = tuple(_of_first([candidate.row() for candidate in candidates], carry))
    return Tuning(_choose(rows), rows)


def _choose(rows: Sequence[TuningRow]) -> int:
    alone, *fused = rows
    best = min(row.microseconds for row in fused)
    if alone.microseconds * TOLERANCE < best:
        return 1
    return next(row.k for row in fused if row.microseconds <= best * TOLERANCE)


def _of_first(found: Any, carry: PyTree) -> Any:
    """Returns what the first process found, where several hold a state: all must do the same."""
    own = all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(carry))
    return found if own else of_each_process(found)[0]


def _jitted(step: Any, carry: PyTree) -> Callable[[PyTree, PyTree], Any]:
    where = _placement.pins(carry)

    def once(state: PyTree, batch: PyTree) -> Any:
        with guarded(step):
            return _placement.pinned(step(state, batch), where)

    jitted: Callable[[PyTree, PyTree], Any] = jit(once, donate_argnums=0)
    return jitted


class Candidate:
    """One way of taking steps, compiled, with a state of its own."""

    def __init__(self, k: int, program: Any, state: PyTree, batches: PyTree, size: int) -> None:
        self._k, self._program, self._size = k, program, size
        self._state = _tree.copy(state)
        self._batches = jax.tree.map(jnp.asarray, batches)
        leaves = jax.tree.leaves(self._state)
        self._on_several = any(len(x.sharding.device_set) > 1 for x in leaves)
        first = self._call()
        once = _of_first(self._call(), state)
        self._compile = first - once
        self._calls = max(1, round(ROUND_SECONDS / max(once, 1e-7)))
        self._times: list[float] = []

    def _call(self, calls: int = 1) -> float:
        began = time.perf_counter()
        for number in range(calls):
            self._state, _ = self._program(self._state, self._batches)
            if self._on_several and number % RUN_AHEAD == 0:  # behind many, CPU devices hang
                jax.block_until_ready(self._state)
        jax.block_until_ready(self._state)
        return time.perf_counter() - began

    def measure(self) -> None:
        """Takes the time of a round."""
        self._times.append(self._call(self._calls) / self._calls / max(1, self._k))

    def row(self) -> TuningRow:
        """Returns what was measured."""
        median = statistics.median(self._times)
        return TuningRow(self._k, median * 1e6, self._compile, self._size)
