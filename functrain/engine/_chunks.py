"""From batches to chunks: K at a time, fewer where something is due or nothing is left."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.data._sources import Pass
from functrain.engine._plan import Plan


class Chunk(NamedTuple):
    """What a program takes: K stacked batches, of which the first `steps` are to be used.

    Attributes:
      batches: Every leaf `[k, B, ...]`.
      k: Batches it has room for.
      steps: Batches in it.
      examples: In each batch, B.
      marks: What else the source says of each step, if it does.
    """

    batches: PyTree
    k: int
    steps: int
    examples: int
    marks: Any = None


def chunked(
    batches: Pass,
    plan: Plan,
    until: Callable[[int], int | None],
    *,
    ragged: Literal["error", "alone"] = "error",
    where: str = "",
    start: int = 0,
) -> Iterator[Chunk]:
    """Yields the chunks of one pass.

    All batches like the first of the run are stacked, up to K. Any other makes a chunk of its
    own, so that a smaller last batch costs one more program, whatever its place.

    Nothing is reused: every chunk is made of fresh memory, since a device may still be reading
    the one before. Making it overlaps with the device's work, because dispatch does not wait.

    Args:
      batches: The pass.
      plan: Settles K at the first batch, for this pass and the next ones.
      until: Given the number of the next batch, returns how many there may be until a chunk has to
        end; None for as many as you like.
      ragged: Whether batches unlike the first are an error, but for a smaller one at the end, or
        go alone wherever they come.
      where: In which epoch, for errors.
      start: Number of the first batch.
    """
    at, last = start, False
    while (spec := batches.spec()) is not None:
        if plan.first is None:
            plan.settle(*(batches.usual() or (spec, batches.peek())))
        alike = spec == plan.first
        if ragged == "error":
            if last:
                raise ValueError(
                    "data: expected only the last batch to be smaller, but batches follow the "
                    f"smaller one at step {at - 1} of {where}. Each new size would compile a "
                    "program: drop the remainder, or pad to one size."
                )
            last = not alike
            if last and not batches.knows_sizes:
                _require_smaller(plan.batch, batches.peek(), where, at)
        k = plan.k if alike else 1
        room = until(at) if alike else None
        stack = batches.take(k if room is None else min(k, room), k)
        yield Chunk(stack.batches, k, stack.steps, stack.examples, stack.marks)
        at += stack.steps


def _require_smaller(first: PyTree, batch: PyTree, where: str, step: int) -> None:
    """Refuses a batch that differs from the first in more than having fewer examples."""
    same = _tree.structure(first) == _tree.structure(batch)
    if not same or not all(map(_smaller, jax.tree.leaves(batch), jax.tree.leaves(first))):
        raise ValueError(
            f"data: expected every batch like the first, got another at step {step} of {where}:\n"
            f"{_tree.bullets(_tree.differences(first, batch))}\n"
            "Only the last batch of an epoch may be smaller."
        )


def _smaller(a: Any, b: Any) -> bool:
    same = a.shape[1:] == b.shape[1:] and a.dtype == b.dtype
    return bool(same and a.shape[:1] <= b.shape[:1])
