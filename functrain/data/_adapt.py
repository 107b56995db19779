"""Converts what users pass as data to `Batches`; the batches of a loader."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from functrain.common._types import PyTree
from functrain.data._arrays import host_batch
from functrain.data._batches import Batches, Chunk, SeekableLoader
from functrain.data._iterator import IteratorBatches
from functrain.data._local import Local, LocalBatches
from functrain.data._lookahead import Lookahead
from functrain.data._same_data import Summary, differences
from functrain.data._stack import stack_batches


def as_batches(data: Any, name: str = "data", steps_before: int = 0) -> Batches:
    """Converts the data of `fit`, `run`, `evaluate` and `predict` to `Batches`.

    Args:
      data: A loader that can seek, such as `ArrayLoader` or `NoData`; an iterable of batches;
        either of these in `functrain.distributed.local`; or `Batches`, which are returned
        unchanged.
      name: The argument that the data were passed as, for errors.
      steps_before: A loader continues with the orders that follow this number of earlier steps.

    Raises:
      TypeError: `data` is something else.
    """
    if isinstance(data, Batches):
        return data
    if isinstance(data, Local):
        return LocalBatches(as_batches(data.data, name, steps_before), data)
    # A subclass that iterates in its own way is an iterable like any other.
    if isinstance(data, SeekableLoader) and type(data).__iter__ is SeekableLoader.__iter__:
        return LoaderBatches(data, name, steps_before)
    _require_iterable(data, name)
    return IteratorBatches(data, name)


def _require_iterable(data: Any, name: str) -> None:
    """Raises TypeError unless data are an iterable of batches: arrays are cut by a loader."""
    # All of these can be iterated, but yield rows, keys, characters or numbers.
    is_array = isinstance(data, dict | np.ndarray | jax.Array | str | bytes)
    is_tuple_of_arrays = isinstance(data, tuple) and any(hasattr(x, "shape") for x in data)
    first = data[:1] if isinstance(data, list | tuple) else ()
    is_list_of_numbers = any(isinstance(x, bool | int | float | complex | str) for x in first)
    is_one_batch = is_array or is_tuple_of_arrays or is_list_of_numbers
    if is_one_batch or not isinstance(data, Iterable):
        raise TypeError(
            f"{name}: expected an ArrayLoader or an iterable of batches, got "
            f"{type(data).__name__}. For arrays: functrain.ArrayLoader((x, y), batch_size); "
            "without data: functrain.NoData(n). Call a generator function."
        )


class LoaderBatches(Batches):
    """Batches of a loader that can seek; full batches are gathered K at a time.

    Args:
      loader: The loader.
      name: The argument that it was passed as, for errors.
      steps_before: Steps before those of this run.
    """

    can_seek = True

    def __init__(self, loader: SeekableLoader, name: str, steps_before: int) -> None:
        self.data: SeekableLoader = loader
        self.name = name
        self.steps: int = len(loader)
        self.full_steps: int = min(loader.examples // loader.batch_size, self.steps)
        # After a part of an epoch, the next epoch begins with a new order.
        self.epochs_before = -(-steps_before // self.steps)
        self._epoch = self._next = 0
        # Made once: `Plan` recognizes the full batches of a run as the same object.
        sizes = [loader.batch_size]
        if self.steps > self.full_steps:
            sizes.append(loader.examples % loader.batch_size)
        self._shapes = list(map(loader.shapes, sizes)) if loader.knows_shapes else []
        # The rest of the epoch, for a loader whose batches have to be made to know their shapes.
        self._rest: Lookahead[PyTree] | None = None
        self._summary: Summary = {}

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch at one of its batches."""
        self._epoch, self._next = epoch + self.epochs_before, batch
        if not self.data.knows_shapes:
            batches = enumerate(self.data.epoch(self._epoch, batch), batch)
            label = f"of epoch {self._epoch} of {self.name}"
            self._rest = Lookahead(host_batch(x, f"batch {i} {label}") for i, x in batches)

    def peek(self) -> PyTree | None:
        """Returns the next batch, or its shapes if `take` is to make it."""
        if self._next >= self.steps:
            return None
        if self._rest is not None:
            return self._rest.peek()
        return self._shapes[0 if self._next < self.full_steps else -1]

    def take(self, k: int, limit: int) -> Chunk:
        """Makes the next batches."""
        # A smaller last batch has a chunk to itself.
        steps = max(1, min(limit, self.full_steps - self._next))
        if self._rest is not None:
            batches, steps = stack_batches(self._rest.take(steps), k)
        else:
            batches = self.data.chunk(self._epoch, self._next, steps, k)
        self._next += steps
        return Chunk(batches, k, steps)

    def put_on_device(self, room: int) -> None:
        """Puts the data of the loader on the device."""
        self.data.put_on_device(room, self.name)

    def known_shapes(self) -> list[PyTree]:
        """Returns the shapes of a full batch, and of a smaller last one."""
        return self._shapes

    def fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the loader."""
        return self.data.fingerprint()

    def track(self) -> None:
        """Takes a few numbers of the data, which a resumed run compares."""
        self._summary = self.data.summary()

    def state(self, *, epoch_is_over: bool) -> dict[str, Any]:
        """Returns the number of epochs before those of this run, and a few numbers of the data."""
        return {"epochs_before": self.epochs_before, "data": self._summary}

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Restores the number of earlier epochs, whatever the state of this run has counted."""
        self.epochs_before = state["epochs_before"]
        return differences(state["data"], self._summary, "the data")
