"""Batches: the protocol between data and the engine."""

import abc
from typing import Any, NamedTuple

import jax

from functrain.common._types import PyTree


class Chunk(NamedTuple):
    """Stacked batches for one program, which uses the first `steps` of them.

    Attributes:
      batches: Every leaf `[k, B, ...]`; zeros after the first `steps`.
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


def shapes(batch: PyTree) -> PyTree:
    """Returns the shapes and dtypes of a batch; 64-bit dtypes are kept, unlike in jax."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
