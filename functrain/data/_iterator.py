"""Batches of an iterable: each is copied once, into the chunk it belongs to."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.data._arrays import is_supported_dtype, require_no_number_lists, require_unmasked
from functrain.data._batch import batch_size
from functrain.data._batches import Batches, Chunk, batch_signature, shapes
from functrain.data._iterator_position import IteratorPosition
from functrain.data._same_data import Summary, differences, summary
from functrain.data._stack import stack_batches


class IteratorBatches(Batches):
    """Batches of an iterable.

    All must be like the first one of the run, but for a smaller one at the end of an epoch. If
    the iterator raises, the batches before the error are handed out first.

    Args:
      data: The iterable.
      name: The argument it was passed as, for errors.
    """

    def __init__(self, data: Any, name: str = "data") -> None:
        self.data, self.name = data, name
        self.is_iterator = isinstance(data, Iterator)
        with contextlib.suppress(TypeError, NotImplementedError):  # those without a length
            self.steps = len(data)
        self._batches: Iterator[PyTree] = iter(())
        self._next: PyTree | None = None  # fetched to look at, not taken yet
        self._error: Exception | None = None  # raised by the iterator after the batches taken
        self._is_fresh = False  # begun by `first` or `restore`, and nothing taken since
        self._full: PyTree | None = None  # shapes of the run's first batch: others must be like it
        self._epoch = self._taken = 0
        self._smaller_at: int | None = None  # number of a smaller batch taken in this epoch
        self._position: IteratorPosition | None = None
        self._last_summary: Summary | None = None

    def first(self) -> PyTree | None:
        """Returns the first batch; the next `begin` continues with it."""
        batch = super().first()
        self._is_fresh = True
        return batch

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch; batches before the given one are fetched and left out."""
        if not self._is_fresh:
            self._open(epoch, batch, None)
        self._is_fresh = False

    def peek(self) -> PyTree | None:
        """Returns the next batch, which is fetched for that.

        Raises:
          ValueError: It is unlike the first one of the run, or follows a smaller one.
        """
        if self._next is None:
            if self._error is not None:
                raise self._error
            self._next = next(self._batches, None)
        if self._next is not None:
            self._require_like_first(self._next)
        return self._next

    def take(self, k: int, limit: int) -> Chunk:
        """Copies the next batches of one kind into a chunk."""
        batch = self._next
        assert batch is not None, "peek comes first"
        self._next = None
        batches, steps = stack_batches(itertools.islice(self._alike(batch), limit), k)
        if batch_signature(batch) != batch_signature(self._full):
            self._smaller_at = self._taken
        self._taken += steps
        if self._position is not None:
            self._position.taken += steps
        return Chunk(batches, k, steps, batch_size(batch))

    def full_batch(self) -> PyTree | None:
        """Returns the shapes of the first batch of the run, once it is known."""
        return self._full

    def known_shapes(self) -> list[PyTree]:
        """Returns the first and the last batch of a list, as arrays."""
        if not isinstance(self.data, list | tuple):
            return []
        ends = self.data[0], self.data[-1]
        return [
            jax.tree.map(lambda x: x if hasattr(x, "shape") else np.asarray(x), b) for b in ends
        ]

    def track(self) -> None:
        """Begins to note where the iterator is."""
        self._position = IteratorPosition(self.data)
        # A long or endless dataset of grain has a length, and may have no batch at its end.
        with contextlib.suppress(Exception):
            self._last_summary = summary(host_batch(self.data[len(self.data) - 1], "data"))

    def state(self, *, epoch_is_over: bool) -> dict[str, Any] | None:
        """Returns where the iterator is, and summaries of the data to recognize them by."""
        position = self._position
        if position is None or position.run_start is None:
            return None
        if epoch_is_over:
            saved = position.next_epoch()
        else:
            if self._next is None and self._error is None:  # nothing fetched ahead
                position.save()
            saved = position.saved
        return {"position": saved, "first": position.run_start, "last": self._last_summary}

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Continues at a saved position, after comparing the data with those of the saved run."""
        if state is None or self._position is None:
            return []
        first, last = state["first"], state["last"]
        if last and self._last_summary:
            changed = differences(last, self._last_summary, "last")
            if changed:
                return changed
        self._position.run_start = first
        if first["state"] is None:
            changed = self._fetch_again(first["batch"], epoch, batch, state["position"])
        else:
            changed = self._compare_first(first)
            if not changed:
                self._open(epoch, batch, state["position"])
        self._is_fresh = True
        return changed

    def _open(self, epoch: int, batch: int, saved: dict[str, Any] | None) -> None:
        """Begins a pass at a batch of it.

        Args:
          epoch: Number of the epoch, for errors.
          batch: Number of the batch. Those before it are fetched and left out, but for those
            before the saved position.
          saved: A position in a pass over the same data.

        Raises:
          ValueError: There are not so many batches.
        """
        self._next = self._error = self._smaller_at = None
        self._epoch, position = epoch, self._position
        iterator, opened_at = (iter(self.data), 0) if position is None else position.begin(saved)
        self._taken = opened_at
        self._batches = self._host_batches(iterator)
        for left_out in itertools.islice(self._batches, max(0, batch - opened_at)):
            if self._full is None:
                self._full = shapes(left_out)
            self._taken += 1
        if self._taken < batch:
            raise ValueError(
                f"start: expected more than {batch} batches in epoch {epoch} of {self.name}, got "
                f"{self._taken}. The data are not those of the first run."
            )
        if position is not None and self._taken > opened_at:
            position.taken = self._taken
            position.save()

    def _host_batches(self, iterator: Iterator[Any]) -> Iterator[PyTree]:
        """Yields the batches as arrays, and tells the position of the first one and of the end."""
        first = self._taken
        for number, batch in enumerate(iterator, first):
            if number == first:
                require_no_number_lists(batch, f"{self.name}: batch {number}", (list,))
            if batch is None:
                raise TypeError(
                    f"{self.name}: expected batches, got None as batch {number} of epoch "
                    f"{self._epoch}. A batch without arrays is an empty tuple, ()."
                )
            arrays = host_batch(batch, f"batch {number} of epoch {self._epoch} of {self.name}")
            if self._position is not None and number == first:
                self._position.saw(arrays)
            yield arrays
        if self._position is not None:
            self._position.ended = True

    def _alike(self, batch: PyTree) -> Iterator[PyTree]:
        """Yields a batch and those after it that can be stacked with it."""
        yield batch
        expected = batch_signature(batch)
        try:
            for other in self._batches:
                if batch_signature(other) != expected:
                    self._next = other
                    return
                yield other
        except Exception as error:
            self._error = error

    def _require_like_first(self, batch: PyTree) -> None:
        """Raises ValueError unless a batch is like the first one, or a smaller one at the end."""
        if self._full is None:
            self._full = shapes(batch)
        if self._smaller_at is not None:
            raise ValueError(
                f"{self.name}: expected only the last batch to be smaller, but batches follow the "
                f"smaller one at step {self._smaller_at} of epoch {self._epoch}. Each new size "
                "would compile a program: drop the remainder, or pad to one size."
            )
        same_structure = _tree.structure(self._full) == _tree.structure(batch)
        pairs = zip(jax.tree.leaves(batch), jax.tree.leaves(self._full), strict=False)
        if not same_structure or not all(_has_at_most_as_many(x, full) for x, full in pairs):
            raise ValueError(
                f"{self.name}: expected every batch like the first, got another at step "
                f"{self._taken} of epoch {self._epoch}:\n"
                f"{_tree.bullets(_tree.differences(self._full, batch))}\n"
                "Only the last batch of an epoch may be smaller."
            )

    def _compare_first(self, first: dict[str, Any]) -> list[str]:
        """Compares the run's first batch with the one that comes from the same state now."""
        beginning = {"state": first["state"], "batch": 0, "ended": False}
        try:
            now = self._first_seen_from(beginning)
        except Exception as error:
            return [f"the state that was saved is not taken: {type(error).__name__}: {error}"]
        if now is None:
            return ["batches: saved with some, now none"]
        changed = differences(first["batch"], now, "first")
        if changed and now != self._first_seen_from(beginning):
            warnings.warn(
                f"{self.name}: a {type(self.data).__name__} gives other numbers each time, from "
                "the same state too: something in it draws random numbers that are no part of "
                "its state. The run resumes, but not bit for bit.",
                stacklevel=2,
            )
            return []
        return changed

    def _first_seen_from(self, position: dict[str, Any]) -> Summary | None:
        """Opens a pass at a position; returns a summary of the first batch that it fetches."""
        self._open(0, 0, position)
        self._full = None
        self.peek()
        assert self._position is not None
        return self._position.first_seen

    def _fetch_again(
        self, first: Summary, epoch: int, batch: int, saved: dict[str, Any]
    ) -> list[str]:
        """Continues in data without a state: fetches an epoch's first batches again."""
        is_list = isinstance(self.data, list | tuple)
        if first and batch and not is_list and not saved["ended"]:
            warnings.warn(
                f"{self.name}: a {type(self.data).__name__} does not say where it is. Its first "
                f"{batch} batches are fetched again and left out; those after them are the same "
                "only if it gives the same batches each time.",
                stacklevel=2,
            )
        self._open(epoch, batch, saved)
        self.peek()
        assert self._position is not None
        now = self._position.first_seen
        if now is None:  # the epoch was over: nothing was fetched
            return []
        return differences(first, now, "first", compares_numbers=is_list)


def _has_at_most_as_many(x: Any, full: Any) -> bool:
    """Returns True if an array is like another one, with as many examples or fewer."""
    same = x.shape[1:] == full.shape[1:] and x.dtype == full.dtype
    return bool(same and x.shape[:1] <= full.shape[:1])


def host_batch(batch: PyTree, place: str) -> PyTree:
    """Returns a batch with tensors of other libraries as NumPy arrays; those of jax stay."""
    leaves, structure = jax.tree.flatten(batch)
    arrays = [x if isinstance(x, jax.Array) else _numpy(x, batch, place) for x in leaves]
    return jax.tree.unflatten(structure, arrays)


def _numpy(leaf: Any, batch: PyTree, place: str) -> np.ndarray:
    def path() -> str:
        return next(path for path, x in _tree.leaves_with_path(batch) if x is leaf)

    require_unmasked(leaf, "data", lambda: f" at {path()} of {place}")
    array = np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
    if not is_supported_dtype(array.dtype):
        raise TypeError(
            f"data: expected batches of numbers, got {type(leaf).__name__} of {array.dtype} at "
            f"{path()} of {place}. Convert it first."
        )
    return array
