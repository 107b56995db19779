"""Groups batches into chunks of K, or fewer where a trigger is due, and chooses K by a cheap rule.

Batches of a few different shapes are allowed, such as those of sequences that are padded to one of
several lengths. Each shape has its own K, and its own program.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import jax

from functrain.common import _tree
from functrain.common._checks import is_integer, require
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.data._batches import Batches, Chunk
from functrain.engine._position import Position
from functrain.engine._trigger import Trigger, steps_until_due
from functrain.targets._chips import Chip, machine_memory

FuseArg: TypeAlias = int | Literal["auto"]

# More shapes of batches are probably a mistake.
MAX_SHAPES = 16
MAX_STEPS = 128
MIN_STEPS = 8
CHUNK_BYTES = 64 * 2**20
# A chunk that stays in the processor's cache between its making and its use is read faster: an
# MLP for MNIST took 124 µs a step in chunks of 3 MiB, 160 µs in chunks of 13 MiB, and 200 µs in
# one of 100 MiB.
CACHE_BYTES = 4 * 2**20
# A step reads and writes its whole state, so this much of it is a fraction of a second: programs
# stay short enough for progress, interrupts and timers, and long enough to hide a dispatch.
STATE_BYTES = 256 * 2**20
# While a program predicts, the outputs of the one before are fetched and the inputs of the next are
# made, and on CPU two programs run at a time. On a busy machine a step of an LSTM took 0.45 ms in
# one program and 0.34 ms in four (the minimum of each; medians 6 to 9 % apart), a step of a convnet
# 2.61 and 2.75 ms.
PREDICTING_PROGRAMS = 4
# On accelerators, the time that a program takes: short enough for progress and interrupts.
PROGRAM_SECONDS = 0.25
# The part of an accelerator's memory that a chunk may take; three of them exist at once.
CHUNK_PART = 1 / 64
# Batches are stacked in runs of at least K divided by this number, and of two.
PADDING = 8
# For a device that is not in the table of chips: less than that of any accelerator in use.
BANDWIDTH = 200e9


@dataclasses.dataclass(eq=False)
class Group:
    """The batches of one shape.

    Attributes:
      k: Steps in a program, K.
      run_length: How many of them have followed one another in the current or the latest run.
      is_stacked: True if those of the current run are stacked, False if each is taken alone.
    """

    k: int
    run_length: int = 0
    is_stacked: bool = False


@dataclasses.dataclass(eq=False, repr=False)
class Plan:
    """Chooses K for each shape of batches, when the first batch of that shape is known.

    Args:
      fuse: K, or "auto".
      state_bytes: Size of the program's carry.
      row_bytes: Given a batch, returns the size of a step's outputs. Needed only for predictions,
        whose outputs are large.
      intervals: Returns the numbers of steps between pauses; see `auto_steps`.
      chip: The accelerator that the programs run on; None for a CPU.

    Attributes:
      first: The group of the first batch; None before it is known.
      latest: The group of the latest batch.
      is_mixed: True once other batches have followed one that is not like the first.

    Raises:
      ValueError: `fuse` is neither "auto" nor a positive integer.
    """

    fuse: FuseArg
    state_bytes: int = 0
    row_bytes: Callable[[PyTree], int] | None = None
    intervals: Callable[[], Iterable[int | None]] = tuple
    chip: Chip | None = None

    def __post_init__(self) -> None:
        require_fuse(self.fuse)
        self.first: Group | None = None
        self.latest: Group | None = None
        self.is_mixed = False
        self._groups: dict[Any, Group] = {}
        self._first_batch: PyTree = None

    def group_of(self, batch: PyTree) -> Group:
        """Returns the group of a batch, and chooses its K if it is the first one of its shape.

        Args:
          batch: The batch, or its shapes.
        """
        # Loaders return one object for all batches of full size, and a signature takes time.
        if self.first is not None and batch is self._first_batch:
            return self.first
        signature = _tree.signature(batch)
        if signature not in self._groups:
            group = self._groups[signature] = Group(self._choose_k(batch))
            if self.first is None:
                self.first, self._first_batch = group, batch
            if len(self._groups) == MAX_SHAPES + 1:
                warn(
                    f"data: expected batches of at most {MAX_SHAPES} shapes, got more, and each "
                    "shape costs a compilation. Pad them to a few, such as powers of two."
                )
        return self._groups[signature]

    def _choose_k(self, batch: PyTree) -> int:
        size = nbytes(batch)
        if self.row_bytes is not None:
            # With the dtypes that arrays have in jax, which warns of others when it traces a step.
            size += self.row_bytes(
                jax.tree.map(lambda x: x if isinstance(x, jax.Array) else _tree.shapes(x), batch)
            )
        intervals = list(filter(None, self.intervals()))
        if self.fuse == "auto":
            return auto_steps(size, self.state_bytes, intervals, chip=self.chip)
        # A longer chunk than there are steps between two pauses would be padded every time.
        # And not more than there is room for: up to three chunks exist at a time, and on an
        # accelerator the state and the step need memory as well.
        memory = machine_memory() // 2 if self.chip is None else self.chip.memory_bytes // 4
        room = memory // max(1, size)
        return max(1, min([int(self.fuse), room, *intervals]))


def require_fuse(fuse: Any) -> None:
    """Raises ValueError unless `fuse` is "auto" or a positive integer."""
    is_valid = (isinstance(fuse, str) and fuse == "auto") or is_integer(fuse, 1)
    require(is_valid, "fuse", "'auto' or a whole number of steps", fuse)


def auto_steps(
    batch_bytes: int,
    state_bytes: int,
    intervals: Iterable[int | None] = (),
    *,
    chip: Chip | None = None,
) -> int:
    """Returns K, within limits on memory and on the time that a program takes.

    Args:
      batch_bytes: Size of one batch, including the outputs of its step.
      state_bytes: Size of the state.
      intervals: Numbers of steps between pauses: the length of an epoch, the interval of a trigger.
        None where unknown. K is no larger than any of them.
      chip: The accelerator; None for a CPU.

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
    if chip is None:
        limit_by_time = STATE_BYTES // max(1, state_bytes)
        limit_by_cache = CACHE_BYTES // max(1, batch_bytes)
        # The only limit that may go below MIN_STEPS, since a chunk has to fit into memory.
        limit_by_memory = CHUNK_BYTES // max(1, batch_bytes)
    else:
        # A step reads and writes its state at least once.
        bytes_of_program = PROGRAM_SECONDS * (chip.bandwidth or BANDWIDTH)
        limit_by_time = int(bytes_of_program / max(1, 2 * state_bytes))
        limit_by_cache = MAX_STEPS
        limit_by_memory = int(CHUNK_PART * chip.memory_bytes / max(1, batch_bytes))
    limits = max(MIN_STEPS, limit_by_time), max(MIN_STEPS, limit_by_cache), limit_by_memory
    return max(1, min(MAX_STEPS, *limits, *filter(None, intervals)))


def nbytes(tree: PyTree) -> int:
    """Returns the bytes of all arrays in a tree, abstract ones too; Python numbers count 0."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and hasattr(leaf, "size"):
            # The dtypes of some extended arrays have no itemsize.
            total += int(leaf.size) * getattr(leaf.dtype, "itemsize", 0)
    return total


def chunks(
    batches: Batches,
    plan: Plan,
    triggers: Iterable[Trigger] = (),
    position: Position = Position(),  # noqa: B008  # a tuple, which is immutable
) -> Iterator[Chunk]:
    """Begins an epoch at a position, and yields its chunks.

    All batches of a chunk have one shape. Those with the shapes of the run's first batch are
    stacked, up to K of them. If other shapes come, each has a program for one batch, and one for K
    if its batches come in long runs. So a smaller last batch costs one more program, batches that
    change their shapes often are not padded to K, and long runs of a shape are fused.

    Every chunk is made of fresh memory, since a device may still be reading the one before. Making
    a chunk overlaps with the device's work, because dispatch does not wait.

    Args:
      batches: The data.
      plan: Chooses K for each shape, for this epoch and the next ones.
      triggers: A chunk ends where one of them is due.
      position: The position of the first batch.
    """
    batches.begin(position.epoch, position.batch)
    number, previous = position.batch, None
    steps_before = position.step - position.batch
    while (batch := batches.peek()) is not None:
        if plan.first is None:
            # The first batch may be a smaller one: a run can resume at the last of an epoch.
            plan.group_of(next(iter(batches.known_shapes()), batch))
        group = plan.group_of(batch)
        # Only a smaller batch at the end of an epoch is not followed by others.
        plan.is_mixed = plan.is_mixed or previous not in (None, group, plan.first)
        if group is not plan.latest:
            # This run is taken to be as long as the last one of its shape.
            is_long_run = group.run_length >= max(2, group.k // PADDING)
            group.is_stacked = is_long_run or (group is plan.first and not plan.is_mixed)
            group.run_length, plan.latest = 0, group
        elif group.run_length >= max(2, group.k // PADDING):
            group.is_stacked = True
        if group.is_stacked:
            full_steps = batches.full_steps if group is plan.first else None
            until_due = steps_until_due(triggers, steps_before + number)
            limits = _rows_and_limit(group.k, plan, until_due, full_steps, number)
            chunk = batches.take(*limits)
        else:
            # Room for one batch only: a chunk with room for K would hold zeros in all other rows.
            chunk = batches.take(1, 1)
        yield chunk
        number, previous = number + chunk.steps, group
        group.run_length += chunk.steps


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
