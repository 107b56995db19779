"""Groups batches of one shape into chunks of K, or fewer where a trigger is due."""

from collections.abc import Callable, Iterator

from functrain.data._batches import Batches, Chunk
from functrain.engine._plan import Group, Plan

# Batches are stacked in runs of at least K divided by this number, and of two.
PADDING = 8


def chunks(
    batches: Batches,
    plan: Plan,
    until_due: Callable[[int], int | None] = lambda batch: None,
    *,
    start: int = 0,
) -> Iterator[Chunk]:
    """Yields the chunks of the epoch that `batches` has begun.

    All batches of a chunk have one shape. Those with the shapes of the run's first batch are
    stacked, up to K of them. If other shapes come, each has a program for one batch, and one for K
    if its batches come in long runs. So a smaller last batch costs one more program, batches that
    change their shapes often are not padded to K, and long runs of a shape are fused.

    Every chunk is made of fresh memory, since a device may still be reading the one before. Making
    a chunk overlaps with the device's work, because dispatch does not wait.

    Args:
      batches: The data.
      plan: Chooses K for each shape, for this epoch and the next ones.
      until_due: Given the number of the next batch, returns how many batches a chunk may hold
        before it has to end; None if nothing is due.
      start: Number of the first batch.
    """
    number, previous = start, None
    while (batch := batches.peek()) is not None:
        if plan.first is None:
            # The first batch may be a smaller one: a run can resume at the last of an epoch.
            full_batch = batches.full_batch()
            plan.group_of(batch if full_batch is None else full_batch)
        group = plan.group_of(batch, batches.name)
        # Only a smaller batch at the end of an epoch is not followed by others.
        plan.is_mixed = plan.is_mixed or previous not in (None, group, plan.first)
        if group is not plan.latest:
            # This run is taken to be as long as the last one of its shape.
            group.is_stacked = _is_long_run(group) or (group is plan.first and not plan.is_mixed)
            group.run_length, plan.latest = 0, group
        group.is_stacked = group.is_stacked or _is_long_run(group)
        if group.is_stacked:
            full_steps = batches.full_steps if group is plan.first else None
            limits = _rows_and_limit(group.k, plan, until_due(number), full_steps, number)
            chunk = batches.take(*limits)
        else:
            # Room for one batch only: a chunk with room for K would hold zeros in all other rows.
            chunk = batches.take(1, 1)
        yield chunk
        number, previous = number + chunk.steps, group
        group.run_length += chunk.steps


def _is_long_run(group: Group) -> bool:
    """Returns True if the current, or the latest, run of a shape was long enough to be stacked."""
    return group.run_length >= max(2, group.k // PADDING)


def _rows_and_limit(
    k: int, plan: Plan, until_due: int | None, full_steps: int | None, number: int
) -> tuple[int, int]:
    """Returns the rows of the next chunk, and how many batches it may take."""
    limit = k if until_due is None else min(k, until_due)
    if plan.chip is None:
        return k, limit
    # On accelerators the compiler knows the length of the loop, so every length is a program. The
    # powers of two make up any length with few programs.
    if full_steps is not None and number < full_steps:
        limit = min(limit, full_steps - number)
    rows = k if limit == k else 2 ** (limit.bit_length() - 1)
    return rows, rows
