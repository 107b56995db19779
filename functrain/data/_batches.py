"""Batches: the protocol between data and the engine."""

import abc
from typing import Any, NamedTuple

import jax

from functrain.common._checks import require_integer
from functrain.common._types import PyTree

BatchSignature = tuple[Any, tuple[Any, ...]]


class Chunk(NamedTuple):
    """Stacked batches for one program, which uses the first `steps` of them.

    Attributes:
      batches: Every leaf `[k, B, ...]`; zeros after the first `steps`.
      k: Rows of the chunk, the same for most chunks of a run, so that they share a program.
      steps: Batches in the chunk, at most k.
      examples: Examples in each batch, B; 1 if its arrays do not share an axis of examples.
      batch_info: Additional information about each batch for hooks; None for most data.
    """

    batches: PyTree
    k: int
    steps: int
    examples: int
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
    """

    data: Any = None
    name: str = "data"
    can_seek: bool = False
    is_iterator: bool = False
    steps: int | None = None

    @property
    def full_steps(self) -> int | None:
        """Batches of full size in an epoch; None if unknown."""
        return self.steps

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

    # Not abstract: batches without data have no examples.
    def find_examples_along(self, axis: int) -> None:  # noqa: B027
        """Sets the axis of a batch's leaves that its examples lie along, if they are counted."""

    # Not abstract: only loaders have an order that depends on the epoch.
    def continue_after(self, steps: int) -> None:  # noqa: B027
        """Makes a loader continue with the orders that follow a number of earlier steps."""

    @property
    def epochs_before(self) -> int:
        """The number of a loader's epochs before the first one of this run."""
        return 0

    def require_epochs(self, epochs: int) -> None:
        """Raises ValueError if an iterator would have to last for several epochs."""
        if epochs > 1 and self.is_iterator:
            raise ValueError(
                f"{self.name}: expected data that can be iterated {epochs} times, got an iterator, "
                "which is exhausted after one pass. Pass a list, an ArrayLoader or a loader object."
            )


class WrappedBatches(Batches):
    """Base of batches that wrap others: delegates what a subclass does not override.

    Args:
      inner: The wrapped batches.
    """

    def __init__(self, inner: Batches) -> None:
        self._inner = inner
        self.data, self.name, self.steps = inner.data, inner.name, inner.steps
        self.can_seek, self.is_iterator = inner.can_seek, inner.is_iterator

    @property
    def full_steps(self) -> int | None:
        """Batches of full size in an epoch; None if unknown."""
        return self._inner.full_steps

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch at one of its batches."""
        self._inner.begin(epoch, batch)

    def first(self) -> PyTree | None:
        """Returns the first batch, or its shapes; None if there is none."""
        return self._inner.first()

    def known_shapes(self) -> list[PyTree]:
        """Returns the shapes of all batches that are known before the first one is fetched."""
        return self._inner.known_shapes()

    def track(self) -> None:
        """Begins to track the position of data that cannot seek."""
        self._inner.track()

    def find_examples_along(self, axis: int) -> None:
        """Sets the axis of a batch's leaves that its examples lie along."""
        self._inner.find_examples_along(axis)

    def continue_after(self, steps: int) -> None:
        """Makes a loader continue with the orders that follow a number of earlier steps."""
        self._inner.continue_after(steps)

    @property
    def epochs_before(self) -> int:
        """The number of a loader's epochs before the first one of this run."""
        return self._inner.epochs_before


class NoData(Batches):
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

    can_seek = True

    def __init__(self, steps: int) -> None:
        require_integer("steps", steps)
        self.steps: int = int(steps)
        self._next = 0

    def __repr__(self) -> str:
        return f"NoData({self.steps})"

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch."""
        self._next = batch

    def peek(self) -> PyTree | None:
        """Returns an empty batch until the end of the epoch."""
        return () if self._next < self.steps else None

    def take(self, k: int, limit: int) -> Chunk:
        """Returns empty batches."""
        steps = min(limit, self.steps - self._next)
        self._next += steps
        return Chunk((), k, steps, 1)

    def fingerprint(self) -> dict[str, Any]:
        """Returns the number of steps in an epoch."""
        return {"data": "NoData", "batches": self.steps}


def shapes(batch: PyTree) -> PyTree:
    """Returns the shapes and dtypes of a batch; 64-bit dtypes are kept, unlike in jax."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def batch_signature(batch: PyTree) -> BatchSignature:
    """Returns structure, shapes and dtypes: batches that can be stacked have equal signatures."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((x.shape, x.dtype) for x in leaves)
