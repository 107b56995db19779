"""The driver: a carry on its way through programs, and what becomes of it if one fails."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain import rewrites as _rewrites
from functrain.common import _tree
from functrain.common._checks import require_flags
from functrain.common._compile import jit_without_arithmetic
from functrain.common._types import PyTree, traits_of
from functrain.data._batches import Chunk
from functrain.engine import _placement
from functrain.engine._guards import tracing_guards
from functrain.engine._loop import check_carry, reject_text_logs, require_pair
from functrain.engine._notes import error_notes
from functrain.engine._plan import nbytes
from functrain.engine._programs import (
    TRAINING,
    Kind,
    LoopOptions,
    Program,
    prefers_static_length,
    program,
)
from functrain.rewrites import Mode

# How many programs may be under way before the driver waits for the oldest: enough to keep a
# device busy, few enough to bound memory and the time an interrupt takes.
RUN_AHEAD = 2
# A carry of no more than this is copied now and then, to have something whole should a program
# fail with it in its hands (out of memory, an error in a host callback).
SPARE_BYTES = 256 * 2**20
# How often, at the most: such a copy takes some 50 ms of 256 MiB.
SPARE_SECONDS = 2.0


@contextlib.contextmanager
def _uncompiled(step: Any) -> Iterator[None]:
    """Context manager: runs a step operation by operation, under the guards of a program."""
    if traits_of(step).stays_compiled:
        yield
        return
    with tracing_guards(step), jax.disable_jit():
        yield


@dataclasses.dataclass(eq=False, repr=False)
class Driver:
    """Takes chunks through compiled programs: ``(carry, chunk, const) -> (carry, rows)``.

    Training carries the state, and its rows are logs. Evaluation carries metrics, prediction
    nothing, and the state is a constant. The driver owns its carry: every program takes over the
    buffers of the one before.

    Args:
      step: What the programs are made of, and kept with.
      kind: What they do with it.
      rewrites: Which slow operations to rewrite on CPU.
      jit: False runs the body batch by batch, uncompiled. A function decides at the first chunk,
        given the shapes of a batch.
      place: Puts a chunk on the devices.

    Attributes:
      carry: As the last program returned it; its results may still be under way.
    """

    step: Any
    kind: Kind = TRAINING
    rewrites: Mode = "auto"
    jit: bool | Callable[[PyTree], bool] = True
    place: Callable[[PyTree], PyTree] = lambda batches: batches

    def __post_init__(self) -> None:
        self.rewrites = _rewrites.mode(self.rewrites)
        if not callable(self.jit):
            require_flags(jit=self.jit)
        self._programs: dict[tuple[int, bool], Program] = {}
        self._compared: list[Program] = []  # with those of the other processes
        self._const: tuple[PyTree, ...] = ()
        self._in_flight: collections.deque[PyTree] = collections.deque()
        self._spare: tuple[PyTree, Any] | None = None
        self._spare_made = -float("inf")
        self._pins: _placement.Pins | None = None
        self.carry: PyTree = ()

    def begin(self, carry: PyTree, *const: PyTree) -> None:
        """Takes over a carry that nothing else refers to; leaves the constants alone."""
        self.carry, self._const = carry, const
        found = _placement.pins(carry)
        if found != self._pins:
            self._pins, self._programs = found, {}

    def run(self, chunk: Chunk) -> PyTree:
        """Takes a chunk's steps and returns their rows, `[k, ...]`, which may be under way.

        Waits only where too many programs are under way already.
        """
        if callable(self.jit):
            batch = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), chunk.batches
            )
            self.jit = self.jit(batch)
        chunk = chunk._replace(batches=self.place(chunk.batches))
        if self.jit:
            run = self._program(chunk.k, chunk.steps == chunk.k)
            args = (self.carry, chunk.batches, np.int32(chunk.steps), *self._const)
            if jax.process_count() > 1 and run not in self._compared:
                _placement.require_same_program(run, args)
                self._compared.append(run)
            self.carry, rows, done = run(*args)
        else:
            rows = done = self._run_uncompiled(chunk)
        self._in_flight.append(done)
        if len(self._in_flight) > RUN_AHEAD:
            jax.block_until_ready(self._in_flight.popleft())
        return rows

    def wait(self) -> None:
        """Waits for all programs, and raises what one of them raised."""
        while self._in_flight:
            jax.block_until_ready(self._in_flight.popleft())

    def keep_spare(self, mark: Any, *, now: bool = False) -> None:
        """Copies the carry, if it is small and the last copy is old, to go back to in need.

        Args:
          mark: What to return with it, such as a position.
          now: Whether to copy it however young the last copy is.
        """
        if not now and time.perf_counter() - self._spare_made < SPARE_SECONDS:
            return
        if nbytes(self.carry) <= SPARE_BYTES:
            self.wait()  # the copy of what a failed program returned would be worth nothing
            self._spare = None  # the carry is whole: two copies at once would be one too many
            self.adopt_spare(copy_arrays(self.carry), mark)

    def adopt_spare(self, carry: PyTree, mark: Any) -> None:
        """Takes another copy of the carry as the one to go back to, if it is small."""
        if nbytes(carry) <= SPARE_BYTES:
            self._spare, self._spare_made = (carry, mark), time.perf_counter()

    def last_whole(self, mark: Any) -> tuple[PyTree, Any] | None:
        """Returns the carry and the mark, or if a program failed the last copy and its own mark.

        None where there is no such copy. Waits for the programs under way.
        """
        self._in_flight.clear()
        return (self.carry, mark) if is_whole(self.carry) else self._spare

    def _program(self, k: int, full: bool) -> Program:
        takes_all = full and prefers_static_length()
        if (k, takes_all) not in self._programs:
            loop = LoopOptions(k, self.rewrites, takes_all=takes_all, pins=self._pins)
            self._programs[k, takes_all] = program(self.step, self.kind, loop)
        return self._programs[k, takes_all]

    def _run_uncompiled(self, chunk: Chunk) -> PyTree:
        body, rows, carry = reject_text_logs(self.kind.body(self.step)), [], self.carry
        for i in range(chunk.steps):
            batch = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), chunk.batches)
            with error_notes(batch), _uncompiled(self.step):
                new, row = require_pair(body(carry, batch, *self._const))
            check_carry(carry, new)
            carry = new
            rows.append(row)
        self.carry = carry  # after the whole chunk: an error leaves the carry that goes with it
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def is_whole(tree: PyTree) -> bool:
    """Whether all arrays have values: none was in the hands of a program that failed. Waits."""
    try:
        jax.block_until_ready(tree)
    except Exception:
        return False
    return not any(map(_tree.is_deleted, jax.tree.leaves(tree)))


def copy_arrays(tree: PyTree) -> PyTree:
    """Returns a tree of jax arrays with every leaf in a buffer of its own, strongly typed.

    In one program, and where the leaves were; `functrain.common._tree.copy` takes what is no jax
    array, too.
    """
    copies = _copy_arrays(tree)
    return jax.tree.map(_as_placed, copies, tree) if jax.device_count() > 1 else copies


@jit_without_arithmetic
def _copy_arrays(tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: jnp.copy(x) if _tree.is_key(x) else jnp.array(x, dtype=x.dtype, copy=True), tree
    )


def _as_placed(copy: jax.Array, original: jax.Array) -> jax.Array:
    """Says of a copy where it is in the words of the original: P(None) for P()."""
    named = isinstance(original.sharding, jax.sharding.NamedSharding)
    return _tree.device_put(copy, original.sharding) if named else copy
