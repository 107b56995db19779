"""How many steps a program should take: a cheap rule, without measuring."""

from collections.abc import Iterable

MAX_STEPS = 128
MIN_STEPS = 8
CHUNK_BYTES = 64 * 2**20
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
      >>> auto_steps(batch_bytes=8_192, state_bytes=300 * 2**20)
      8
      >>> auto_steps(batch_bytes=32 * 2**20, state_bytes=100_000)
      2
    """
    patience = max(MIN_STEPS, STATE_BYTES // max(1, state_bytes))
    memory = CHUNK_BYTES // max(1, batch_bytes)
    return max(1, min(MAX_STEPS, patience, memory, *(n for n in stretches if n)))
