"""Batches: the protocol between data and the engine; loaders that can seek, and no data."""

import abc
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from functrain.common._checks import require_integer
from functrain.common._types import PyTree
from functrain.data._same_data import Summary


class Chunk(NamedTuple):
    """Stacked batches for one program, which uses the first `steps` of them.

    Attributes:
      batches: Every leaf `[k, B, ...]`; what is in the rows after the first `steps` has no effect.
      k: Rows of the chunk, the same for most chunks of a run, so that they share a program.
      steps: Batches in the chunk, at most k.
      batch_info: Additional information about each batch for hooks; None for most data.
    """

    batches: PyTree
    k: int
    steps: int
    batch_info: Any = None


class ShortPassError(ValueError):
    """A pass over the data has fewer batches than were to be skipped.

    Attributes:
      batches: The number of batches in the pass.
    """

    def __init__(self, message: str, batches: int) -> None:
        super().__init__(message)
        self.batches = batches


class Batches(abc.ABC):
    """The batches of successive epochs, at a position that can be saved and restored.

    The engine calls `begin` for each epoch, then `peek` and `take` until `peek` returns None.

    Attributes:
      data: The data as the user passed them.
      name: The argument that they were passed as, for errors.
      can_seek: True if every batch can be taken at any time, without the ones before it.
      is_iterator: True if the data are exhausted after one epoch.
      steps: Batches in an epoch; None if unknown.
      full_steps: Batches of full size in an epoch; None if unknown.
      epochs_before: The number of a loader's epochs before the first one of this run.
    """

    data: Any = None
    name: str = "data"
    can_seek: bool = False
    is_iterator: bool = False
    steps: int | None = None
    full_steps: int | None = None
    epochs_before: int = 0

    @abc.abstractmethod
    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch at one of its batches; continues one begun by `first` or `restore`.

        Raises:
          ShortPassError: The epoch has fewer batches.
        """

    @abc.abstractmethod
    def peek(self) -> PyTree | None:
        """Returns the next batch of the epoch, or its shapes; None at the end of the epoch."""

    @abc.abstractmethod
    def take(self, k: int, limit: int) -> Chunk:
        """Returns a chunk of the next batches that can be stacked.

        Args:
          k: Rows of the chunk.
          limit: The most batches to take, at most k.
        """

    def first(self) -> PyTree | None:
        """Returns the first batch, or its shapes; None if there is none.

        Call it before the first `begin`, which then begins with this batch.
        """
        self.begin(0)
        return self.peek()

    def known_shapes(self) -> list[PyTree]:
        """Returns the shapes of batches that are known without a fetch; first, of full size."""
        return []

    # Not abstract: most data stay on the host.
    def put_on_device(self, room: int) -> None:  # noqa: B027
        """Puts all data on the default device, if they are arrays of at most `room` bytes."""

    def fingerprint(self) -> dict[str, Any]:
        """Returns properties that distinguish these data from others, for a resumed run."""
        return {"data": type(self.data).__name__, "batches": self.steps}

    # Not abstract: data that can seek have no position to track.
    def track(self) -> None:  # noqa: B027
        """Begins to track the position of data that cannot seek, for `state`."""

    def state(self, *, epoch_is_over: bool) -> Any:
        """Returns the position to save; None if epoch and batch number are enough."""
        return None

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Restores a saved position, at which the next `begin` continues.

        Args:
          state: The value that `state` returned.
          epoch: The epoch to continue in.
          batch: The batch of that epoch to continue at.

        Returns:
          Lines that say how the data differ from those of the saved run; empty if they are equal.
        """
        return []

    def require_epochs(self, epochs: int) -> None:
        """Raises ValueError if an iterator would have to last for several epochs."""
        if epochs > 1 and self.is_iterator:
            raise ValueError(
                f"{self.name}: expected data that can be iterated {epochs} times, got an iterator, "
                "which is exhausted after one pass. Pass a list, an ArrayLoader or a loader object."
            )


def example_count(batch: PyTree, axis: int = 0) -> int | None:
    """Returns the number of examples: the length that all leaves share along an axis.

    Leaves without the axis, such as a number or a key, do not count. None if there are no others,
    or if their lengths differ: then nothing in the batch tells how many examples it has.
    """
    lengths = {leaf.shape[axis] for leaf in jax.tree.leaves(batch) if np.ndim(leaf) > axis}
    return int(lengths.pop()) if len(lengths) == 1 else None


def shapes(batch: PyTree) -> PyTree:
    """Returns the shapes and dtypes of a batch; 64-bit dtypes are kept, unlike in jax."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


class SeekableLoader(abc.ABC):
    """Base of loaders that return any batch by the number of its epoch and its index.

    Attributes:
      examples: Examples in an epoch.
      batch_size: Examples per batch, B.
      drop_remainder: True if a smaller last batch is dropped.
      dropped: Examples of an epoch that are in none of its batches.
      knows_shapes: True if `shapes` are those of the batches; False if only a batch can tell.
    """

    examples: int
    batch_size: int
    drop_remainder: bool
    dropped: int = 0
    knows_shapes: bool = True

    def __len__(self) -> int:
        """Returns the number of batches per epoch, including a smaller last one."""
        return math.ceil((self.examples - self.dropped) / self.batch_size)

    def __iter__(self) -> Iterator[PyTree]:
        """Yields the batches of epoch 0; `epoch` yields those of any epoch."""
        return self.epoch(0)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[PyTree]:
        """Yields the batches of an epoch, from number `start` on."""
        for index in range(start, len(self)):
            yield self.batch(epoch, index)

    @abc.abstractmethod
    def batch(self, epoch: int, index: int) -> PyTree:
        """Returns one batch; the last one may be smaller."""

    @abc.abstractmethod
    def chunk(self, epoch: int, start: int, k: int, pad_to: int | None = None) -> PyTree:
        """Returns the K batches from number `start` on, stacked; a smaller last one by itself.

        With `pad_to`, the result has so many rows. Those after the batches may hold any numbers.
        """

    # Not abstract: most loaders leave their data on the host.
    def put_on_device(self, room: int, name: str) -> None:  # noqa: B027
        """Puts the data on the default device, if they take at most `room` bytes.

        Args:
          room: Bytes.
          name: The argument that the loader was passed as, for warnings.
        """

    @abc.abstractmethod
    def shapes(self, examples: int) -> PyTree:
        """Returns the shapes and dtypes of a batch with a number of examples."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns properties that distinguish these batches from others, for a resumed run."""

    def summary(self) -> Summary:
        """Returns a few numbers of the data, which distinguish them from other data."""
        return {}


class NoData(SeekableLoader):
    """Epochs without data: a number of steps, whose batches are ``()``.

    For steps that make their own examples, as in reinforcement learning or sampling.

    Args:
      steps: Steps in an epoch.

    Raises:
      ValueError: `steps` is below 1.

    Examples:
      >>> import functrain as ft
      >>> state, _ = ft.fit(0, lambda count, batch: (count + 1, {}), NoData(5), epochs=2, verbose=0)
      >>> print(state)
      10
    """

    batch_size = 1
    drop_remainder = False

    def __init__(self, steps: int) -> None:
        require_integer("steps", steps)
        self.examples = int(steps)

    def __repr__(self) -> str:
        return f"NoData({self.examples})"

    def batch(self, epoch: int, index: int) -> PyTree:
        """Returns an empty batch."""
        return ()

    def chunk(self, epoch: int, start: int, k: int, pad_to: int | None = None) -> PyTree:
        """Returns empty batches."""
        return ()

    def shapes(self, examples: int) -> PyTree:
        """Returns an empty batch."""
        return ()

    def fingerprint(self) -> dict[str, Any]:
        """Returns the number of steps in an epoch."""
        return {"data": "NoData", "batches": self.examples}
