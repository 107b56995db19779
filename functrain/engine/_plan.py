"""How many steps a program should take: a cheap rule, without measuring."""

from collections.abc import Iterable

MAX_STEPS = 128
MIN_STEPS = 8
CHUNK_BYTES = 64 * 2**20
# A chunk that stays in the processor's cache from its making to its use is read faster: MNIST's
# MLP took 124 µs a step in chunks of 3 MiB, 160 in chunks of 13, 200 in one of 100.
CACHE_BYTES = 4 * 2**20
# A step reads and writes its whole state, so this much of it is a fraction of a second: programs
# stay short enough for progress, interrupts and timers, and long enough to hide a dispatch.
STATE_BYTES = 256 * 2**20


def auto_steps(batch_bytes: int, state_bytes: int, stretches: Iterable[int | None] = ()) -> int:
    """Returns K: what memory and patience allow.

    Args:
      batch_bytes: Of one batch.
      state_bytes: Of the state.
      stretches: Numbers of steps that are taken without a pause: those of an epoch, those until
        something is due. None where unknown. K is no larger than any.

    Examples:
      >>> auto_steps(batch_bytes=8_192, state_bytes=100_000, stretches=[1_000, None])
      128
      >>> auto_steps(batch_bytes=8_192, state_bytes=100_000, stretches=[1_000, 7])
      7
      >>> auto_steps(batch_bytes=100_000, state_bytes=100_000)
      41
      >>> auto_steps(batch_bytes=8_192, state_bytes=300 * 2**20)
      8
      >>> auto_steps(batch_bytes=32 * 2**20, state_bytes=100_000)
      2
    """
    patience = max(MIN_STEPS, STATE_BYTES // max(1, state_bytes))
    cache = max(MIN_STEPS, CACHE_BYTES // max(1, batch_bytes))
    memory = CHUNK_BYTES // max(1, batch_bytes)
    return max(1, min(MAX_STEPS, patience, cache, memory, *(n for n in stretches if n)))
