"""From batches to chunks: K at a time, fewer where something is due or nothing is left."""

from collections.abc import Callable, Iterator

from functrain.data._batches import Batches, Chunk
from functrain.engine._plan import Plan


def chunks(
    batches: Batches,
    plan: Plan,
    until_due: Callable[[int], int | None] = lambda batch: None,
    *,
    start: int = 0,
) -> Iterator[Chunk]:
    """Yields the chunks of the epoch that `batches` has begun.

    Batches like the first one of the run are stacked, up to K. Any other makes a chunk of its own,
    so that a smaller last batch costs one more program, whatever its place.

    No memory is reused: every chunk is made of fresh memory, since a device may still be reading
    the one before. Making it overlaps with the device's work, because dispatch does not wait.

    Args:
      batches: The data.
      plan: Chooses K at the first batch, for this epoch and the next ones.
      until_due: Given the number of the next batch, returns how many there may be until a chunk
        has to end; None if nothing is due.
      start: Number of the first batch.
    """
    number = start
    while (batch := batches.peek()) is not None:
        if not plan.is_settled:
            full = batches.full_batch()
            plan.settle(batch if full is None else full)
        if plan.is_like_first(batch):
            limit = until_due(number)
            chunk = batches.take(plan.k, plan.k if limit is None else min(plan.k, limit))
        else:
            chunk = batches.take(1, 1)
        yield chunk
        number += chunk.steps
