"""The driver: passes a carry through compiled programs."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._types import PyTree, traits_of
from functrain.data._batches import Chunk
from functrain.engine import _times
from functrain.engine._guards import tracing_guards
from functrain.engine._loop import check_carry, strong
from functrain.engine._placement import sharding_of_scalars
from functrain.engine._processes import require_same_program
from functrain.engine._programs import (
    TRAINING,
    Kind,
    LoopOptions,
    Program,
    count_on,
    loop_options,
    program,
)
from functrain.rewrites import Mode
from functrain.step._notes import error_notes

# How many programs may be in flight before the driver waits for the oldest: enough to keep a
# device busy, few enough to bound memory and the time an interrupt takes.
RUN_AHEAD = 2


@dataclasses.dataclass(eq=False, repr=False)
class Driver:
    """Runs chunks through compiled programs: ``(carry, chunk, n, *const) -> (carry, rows, done)``.

    In training the carry is the state, and the rows are logs. In evaluation the carry holds
    metrics, in prediction it is empty, and in both the state is a constant. The driver owns its
    carry: every program takes over the buffers of the one before.

    Args:
      step: The step that the programs repeat. They are cached for as long as it lives.
      kind: What the programs do with the step: train, evaluate or predict.
      rewrites: Which slow operations to rewrite.
      jit: False runs the body batch by batch, uncompiled.
      put_chunk: Puts a chunk on the devices; None if the programs do.

    Attributes:
      carry: The carry that the last program returned. Its arrays may not be ready yet.
      done: An array that is ready when the last program has run.
    """

    step: Any
    kind: Kind = TRAINING
    rewrites: Mode = "auto"
    jit: bool = True
    put_chunk: Callable[[PyTree], PyTree] | None = None

    def __post_init__(self) -> None:
        self._options: LoopOptions | None = None
        # By K, and whether all K steps are taken.
        self._programs: dict[tuple[int, bool], Program] = {}
        # Programs, and shapes of batches, that were compared with those of the other processes.
        self._compared_programs: list[tuple[Program, Any]] = []
        self._const: tuple[PyTree, ...] = ()
        self._in_flight: collections.deque[PyTree] = collections.deque()
        self._scalars: jax.sharding.Sharding | None = None
        self.carry: PyTree = ()
        self.done: PyTree = ()

    def begin(self, carry: PyTree, *const: PyTree) -> None:
        """Takes over a carry that nothing else refers to; leaves the constants alone."""
        self.carry, self._const = carry, const
        # Programs are compiled for the shardings of the carry.
        options = loop_options(carry, *const, rewrites=self.rewrites)
        self._scalars = sharding_of_scalars((carry, const))
        if options != self._options:
            self._options, self._programs = options, {}

    def run(self, chunk: Chunk) -> PyTree:
        """Takes the steps of a chunk and returns their rows, `[k, ...]`.

        The rows may not be ready yet: this waits only if too many programs are in flight already.
        """
        if self.put_chunk is not None:
            chunk = chunk._replace(batches=self.put_chunk(chunk.batches))
        if self.jit:
            is_full = chunk.steps == chunk.k
            compiled = self._programs.get((chunk.k, is_full))
            if compiled is None:
                assert self._options is not None, "`begin` comes first"
                options = self._options.with_steps(chunk.k, is_full=is_full)
                compiled = program(self.step, self.kind, options)
                self._programs[chunk.k, is_full] = compiled
            batches = _tree.put_if_guarded(chunk.batches, self._scalars)
            args = (self.carry, batches, count_on(self._scalars, chunk.steps), *self._const)
            with _times.compiling():
                if jax.process_count() > 1:
                    self._compare_program(compiled, args)
                self.carry, rows, self.done = compiled(*args)
            if self.done is None:
                # One will do: all results of a program are ready at the same time.
                self.done = jax.tree.leaves(rows)[0]
        else:
            rows = self.done = self._run_uncompiled(chunk)
        self._in_flight.append(self.done)
        if len(self._in_flight) > RUN_AHEAD:
            jax.block_until_ready(self._in_flight.popleft())
        return rows

    def is_running(self) -> bool:
        """Returns True if a program is running."""
        arrays = [x for x in jax.tree.leaves(self.done) if isinstance(x, jax.Array)]
        return any(not x.is_ready() for x in arrays)  # type: ignore[attr-defined]  # untyped in jax

    def _compare_program(self, compiled: Program, args: tuple[PyTree, ...]) -> None:
        """Raises ValueError unless the other processes are about to run the same program."""
        # A program is compiled for each shape of batches.
        key = compiled, _tree.signature(args[1])
        if key not in self._compared_programs:
            # Costs no second lowering: jax keeps the one that the call needs (checked with 0.10.1
            # and 0.12.0).
            require_same_program(compiled, args)
            self._compared_programs.append(key)

    def is_complete(self) -> bool:
        """Returns True if all values of the carry exist. Waits for the programs in flight.

        A program consumes its carry, so nothing is left if one fails.
        """
        # They were waited for only to bound how many there are.
        self._in_flight.clear()
        try:
            jax.block_until_ready(self.carry)
        except Exception:
            return False
        return not any(map(_tree.is_deleted, jax.tree.leaves(self.carry)))

    def _run_uncompiled(self, chunk: Chunk) -> PyTree:
        body, rows, carry = self.kind.body(self.step), [], self.carry
        for i in range(chunk.steps):
            batch = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), chunk.batches)
            with contextlib.ExitStack() as stack:
                stack.enter_context(error_notes(batch))
                # Such a step compiles parts of itself, which stay compiled, as in Keras.
                if not traits_of(self.step).stays_compiled:
                    stack.enter_context(tracing_guards())
                    stack.enter_context(jax.disable_jit())
                new_carry, row = body(carry, batch, *self._const)
            check_carry(carry, new_carry)
            carry = strong(new_carry)
            rows.append(row)
        # Assigned after the whole chunk: after an error within it the position and the carry are
        # both those from before the chunk.
        self.carry = carry
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
