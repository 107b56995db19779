"""How many steps a program takes: a cheap rule, without measuring."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import jax

from functrain.common import _repr
from functrain.common._checks import is_integer, require
from functrain.common._types import PyTree
from functrain.data._batches import BatchSignature, batch_signature, shapes

FuseArg: TypeAlias = int | Literal["auto"]

MAX_STEPS = 128
MIN_STEPS = 8
CHUNK_BYTES = 64 * 2**20
# A chunk that stays in the processor's cache from its making to its use is read faster: MNIST's
# MLP took 124 µs a step in chunks of 3 MiB, 160 in chunks of 13, 200 in one of 100.
CACHE_BYTES = 4 * 2**20
# A step reads and writes its whole state, so this much of it is a fraction of a second: programs
# stay short enough for progress, interrupts and timers, and long enough to hide a dispatch.
STATE_BYTES = 256 * 2**20
# While a program predicts, the outputs of the one before are fetched and the inputs of the next are
# made, and on CPU two run at a time. Of an LSTM, on a busy machine, a step took 0.45 ms in one
# program and 0.34 in four (the least of each; medians 6 to 9 % apart), of a convnet 2.61 and 2.75.
PREDICTING_PROGRAMS = 4


@dataclasses.dataclass(eq=False, repr=False)
class Plan:
    """Settles K once, when the first batch is known.

    Args:
      fuse: K, or "auto".
      state_bytes: Of what the program carries.
      row_bytes: Called with the first batch, returns the bytes of what a step reports, where that
        is large: outputs of a prediction.
      intervals: Returns numbers of steps that are taken without a pause; see `auto_steps`.

    Attributes:
      batch: Shapes of the first batch; all that are like it go K at a time.
      k: K; 0 until it is settled.

    Raises:
      ValueError: `fuse` is neither "auto" nor a whole number from 1 on; or (in `settle`) so many
        batches do not fit into memory.
    """

    fuse: FuseArg
    state_bytes: int = 0
    row_bytes: Callable[[PyTree], int] = lambda batch: 0
    intervals: Callable[[], Iterable[int | None]] = lambda: ()

    def __post_init__(self) -> None:
        require_fuse(self.fuse)
        self.batch: PyTree = None
        self.k = 0
        self._kind: BatchSignature | None = None
        self._first: PyTree = None

    @property
    def is_settled(self) -> bool:
        """Returns True once the first batch is known."""
        return self._kind is not None

    def is_like_first(self, batch: PyTree) -> bool:
        """Returns True if a batch can be stacked with the first one."""
        return batch is self._first or batch_signature(batch) == self._kind

    def settle(self, batch: PyTree) -> None:
        """Chooses K at the first batch."""
        self._first, self._kind = batch, batch_signature(batch)
        self.batch = shapes(batch)
        size = nbytes(batch) + self.row_bytes(batch)
        if self.fuse == "auto":
            self.k = auto_steps(size, self.state_bytes, self.intervals())
        else:
            self.k = _fitting(int(self.fuse), size, self.intervals())


def _fitting(fuse: int, batch_bytes: int, intervals: Iterable[int | None]) -> int:
    """Returns K: `fuse`, or as many steps as are taken without a pause if memory has no room.

    Raises:
      ValueError: There is no room for those either.
    """
    # Half of the memory, since there are two chunks; a single batch is taken whatever its size.
    room = max(1, _memory_bytes() // (2 * max(1, batch_bytes)))
    if fuse <= room:
        return fuse
    k = min(fuse, *(n for n in intervals if n), fuse)
    if k > room:
        raise ValueError(
            f"fuse: expected at most {room:,} steps, whose batches of "
            f"{_repr.format_bytes(batch_bytes)} take half of this machine's memory, got {fuse:,}. "
            "Pass fuse='auto', or fewer."
        )
    return k


def _memory_bytes() -> int:
    """Returns the memory of this machine; a large number where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 2**63


def require_fuse(fuse: Any) -> None:
    """Refuses what is no number of steps."""
    is_valid = (isinstance(fuse, str) and fuse == "auto") or is_integer(fuse, 1)
    require(is_valid, "fuse", "'auto' or a whole number of steps", fuse)


def auto_steps(batch_bytes: int, state_bytes: int, intervals: Iterable[int | None] = ()) -> int:
    """Returns K: what memory and patience allow.

    Args:
      batch_bytes: Of one batch, with what its step reports.
      state_bytes: Of the state.
      intervals: Numbers of steps that are taken without a pause: those of an epoch, those until
        something is due. None where unknown. K is no larger than any.

    Examples:
      >>> auto_steps(batch_bytes=8_192, state_bytes=100_000, intervals=[1_000, None])
      128
      >>> auto_steps(batch_bytes=8_192, state_bytes=100_000, intervals=[1_000, 7])
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
    return max(1, min(MAX_STEPS, patience, cache, memory, *(n for n in intervals if n)))


def nbytes(tree: PyTree) -> int:
    """Returns the bytes of all arrays in a tree, abstract ones too; numbers count 0."""
    leaves = (x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and hasattr(x, "size"))
    return sum(int(x.size) * getattr(x.dtype, "itemsize", 0) for x in leaves)


def prediction_interval(steps: int | None) -> int | None:
    """Returns how many of so many steps a program that predicts takes at most.

    Examples:
      >>> prediction_interval(128), prediction_interval(3), prediction_interval(None)
      (32, 1, None)
    """
    return None if steps is None else max(1, steps // PREDICTING_PROGRAMS)
