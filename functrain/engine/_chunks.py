"""Groups batches into chunks of K, or fewer where a trigger is due or the epoch ends."""

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

    Batches with the shapes of the run's first batch are stacked, up to K of them. Any other batch
    gets a chunk to itself, so that a smaller last batch costs one more program, wherever it comes.

    Every chunk is made of fresh memory, since a device may still be reading the one before. Making
    a chunk overlaps with the device's work, because dispatch does not wait.

    Args:
      batches: The data.
      plan: Chooses K at the first batch, for this epoch and the next ones.
      until_due: Given the number of the next batch, returns how many batches a chunk may hold
        before it has to end; None if nothing is due.
      start: Number of the first batch.
    """
    number = start
    while (batch := batches.peek()) is not None:
        if not plan.is_settled:
            # The first batch may be a smaller one: a run can resume at the last of an epoch.
            full_batch = batches.full_batch()
            plan.settle(batch if full_batch is None else full_batch)
        if plan.is_like_first(batch):
            chunk = batches.take(*_rows_and_limit(plan, until_due(number), batches, number))
        else:
            # Room for one batch only: a chunk with room for K would hold zeros in all other rows.
            chunk = batches.take(1, 1)
        yield chunk
        number += chunk.steps


def _rows_and_limit(
    plan: Plan, until_due: int | None, batches: Batches, number: int
) -> tuple[int, int]:
    """Returns the rows of the next chunk, and how many batches it may take."""
    limit = plan.k if until_due is None else min(plan.k, until_due)
    if plan.chip is None:
        return plan.k, limit
    # On accelerators the compiler knows the length of the loop, so every length is a program. The
    # powers of two make up any length with few programs.
    if batches.full_steps is not None and number < batches.full_steps:
        limit = min(limit, batches.full_steps - number)
    rows = plan.k if limit == plan.k else 2 ** (limit.bit_length() - 1)
    return rows, rows
