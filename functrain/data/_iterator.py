"""Batches of an iterable; each is copied once, into its chunk."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax

from functrain.common import _repr, _tree
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.data._arrays import host_batch, require_no_number_lists
from functrain.data._batch import batch_size
from functrain.data._batches import Batches, Chunk, ShortPassError, batch_signature, shapes
from functrain.data._iterator_position import IteratorPosition
from functrain.data._same_data import Summary, differences, summary
from functrain.data._stack import copy_batch, stack_batches


class IteratorBatches(Batches):
    """Batches of an iterable.

    All batches must have the shapes of the run's first one, except for a smaller one at the end of
    an epoch. If the iterator raises, the batches before the error are returned first.

    Args:
      data: The iterable.
      name: The argument that it was passed as, for errors.
    """

    def __init__(self, data: Any, name: str = "data") -> None:
        self.data, self.name = data, name
        self.is_iterator = isinstance(data, Iterator)
        # Data without a length raise either of these.
        with contextlib.suppress(TypeError, NotImplementedError):
            self.steps = len(data)
        self._batches: Iterator[PyTree] = iter(())
        # A batch that `peek` has fetched, and `take` has not returned yet.
        self._next: PyTree | None = None
        # An error of the iterator, which is raised after the batches before it were taken.
        self._error: Exception | None = None
        # True after `first` or `restore`, until `begin` continues there.
        self._is_open = False
        # The shapes of the run's first batch, which all full batches must have.
        self._full_shapes: PyTree | None = None
        self._example_axis = 0
        self._epoch = self._taken = 0
        # The number of a smaller batch in this epoch, which must be the last one.
        self._smaller_at: int | None = None
        self._position: IteratorPosition | None = None
        self._last_summary: Summary | None = None

    def first(self) -> PyTree | None:
        """Returns the first batch; the next `begin` continues with it."""
        # Batches of other data may be fetched before this one is taken, from the same memory.
        self._next = batch = copy_batch(super().first())
        self._is_open = True
        return batch

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch; batches before the given one are fetched and skipped."""
        if not self._is_open:
            self._open(epoch, batch, None)
        self._is_open = False

    def peek(self) -> PyTree | None:
        """Fetches the next batch if necessary, and returns it.

        Raises:
          ValueError: It differs in shape from the run's first batch, or follows a smaller one.
        """
        if self._next is None:
            if self._error is not None:
                raise self._error
            self._next = next(self._batches, None)
        if self._next is not None:
            self._require_like_first(self._next)
        return self._next

    def take(self, k: int, limit: int) -> Chunk:
        """Copies the next batches that can be stacked into a chunk."""
        batch = self._next
        assert batch is not None, "call peek first"
        self._next = None
        batches, steps = stack_batches(itertools.islice(self._stackable_with(batch), limit), k)
        if batch_signature(batch) != batch_signature(self._full_shapes):
            self._smaller_at = self._taken
        self._taken += steps
        if self._position is not None:
            self._position.taken += steps
        return Chunk(batches, k, steps, batch_size(batch, self._example_axis))

    def find_examples_along(self, axis: int) -> None:
        """Sets the axis of a batch's leaves that its examples lie along."""
        self._example_axis = axis

    def full_batch(self) -> PyTree | None:
        """Returns the shapes of the first batch of the run, once it is known."""
        return self._full_shapes

    def known_shapes(self) -> list[PyTree]:
        """Returns the first and the last batch of a list, as arrays."""
        # In any other iterable, reading a batch would use it up.
        if not isinstance(self.data, list | tuple):
            return []
        ends = (0, len(self.data) - 1)
        return [host_batch(self.data[i], f"batch {i} of epoch 0 of {self.name}") for i in ends]

    def track(self) -> None:
        """Begins to track the position of the iterator."""
        self._position = IteratorPosition(self.data)
        # A long or endless dataset of grain has a length, but may have no batch at its end.
        with contextlib.suppress(Exception):
            self._last_summary = summary(host_batch(self.data[len(self.data) - 1], "data"))

    def state(self, *, epoch_is_over: bool) -> dict[str, Any] | None:
        """Returns the position of the iterator, and what tells other data apart when it resumes.

        `first` is the iterator's state when the run began and a summary of its first batch; `last`
        is a summary of the last batch, if the data can be indexed.
        """
        position = self._position
        if position is None or position.run_start is None:
            return None
        if epoch_is_over:
            saved = position.next_epoch()
        else:
            # With a batch fetched ahead, the iterator's state is already past that batch. Then the
            # last saved position is used, and the batches since then are skipped.
            if self._next is None and self._error is None:
                position.save()
            saved = position.saved
        return {"position": saved, "first": position.run_start, "last": self._last_summary}

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Continues at a saved position, after comparing the data with those of the saved run."""
        if state is None or self._position is None:
            return []
        first, last = state["first"], state["last"]
        if last and self._last_summary:
            changed = differences(last, self._last_summary, "the last batch")
            if changed:
                return changed
        self._position.run_start = first
        if first["state"] is None:
            changed = self._skip_batches(first["batch"], epoch, batch, state["position"])
        else:
            # Before the data are opened at the saved position, since this opens them at the start.
            changed = self._compare_first(first)
            if not changed:
                self._open(epoch, batch, state["position"])
        self._is_open = True
        return changed

    def _open(self, epoch: int, batch: int, saved: dict[str, Any] | None) -> None:
        """Begins a pass at one of its batches.

        Args:
          epoch: Number of the epoch, for errors.
          batch: Number of the batch. The batches between the saved position and this one are
            fetched and skipped.
          saved: A position in a pass over the same data, or None for the start.

        Raises:
          ShortPassError: The pass has fewer batches.
        """
        self._next = self._error = self._smaller_at = None
        self._epoch, position = epoch, self._position
        iterator, opened_at = (iter(self.data), 0) if position is None else position.begin(saved)
        self._taken = opened_at
        self._batches = self._host_batches(iterator)
        for skipped in itertools.islice(self._batches, max(0, batch - opened_at)):
            if self._full_shapes is None:
                self._full_shapes = shapes(skipped)
            self._taken += 1
        if self._taken < batch:
            raise ShortPassError(
                f"start: expected more than {batch} batches in epoch {epoch} of {self.name}, got "
                f"{self._taken}. The data are not those of the first run.",
                self._taken,
            )
        if position is not None and self._taken > opened_at:
            position.taken = self._taken
            position.save()

    def _host_batches(self, iterator: Iterator[Any]) -> Iterator[PyTree]:
        """Yields the batches as arrays; tells the position about the first one and the end."""
        first = self._taken
        for number, batch in enumerate(iterator, first):
            # Once a pass is enough: looking at every leaf takes time.
            if number == first:
                require_no_number_lists(batch, f"{self.name}: batch {number}", (list,))
            if batch is None:
                # `peek` returns None at the end of an epoch, so None cannot be a batch.
                raise TypeError(
                    f"{self.name}: expected batches, got None as batch {number} of epoch "
                    f"{self._epoch}. A batch without arrays is an empty tuple, ()."
                )
            arrays = host_batch(batch, f"batch {number} of epoch {self._epoch} of {self.name}")
            if self._position is not None and number == first:
                self._position.record_first(arrays)
            yield arrays
        if self._position is not None:
            self._position.ended = True

    def _stackable_with(self, batch: PyTree) -> Iterator[PyTree]:
        """Yields a batch and the following ones that can be stacked with it."""
        yield batch
        expected = batch_signature(batch)
        try:
            for other in self._batches:
                if batch_signature(other) != expected:
                    self._next = other
                    return
                yield other
        except Exception as error:
            # Raised by the next `peek`: the batches so far are a chunk.
            self._error = error

    def _require_like_first(self, batch: PyTree) -> None:
        """Raises ValueError unless a batch has the first one's shapes, or is a smaller last one."""
        if self._full_shapes is None:
            self._full_shapes = shapes(batch)
        if self._smaller_at is not None:
            raise ValueError(
                f"{self.name}: expected only the last batch to be smaller, but batches follow the "
                f"smaller one at step {self._smaller_at} of epoch {self._epoch}. Each new size "
                "would compile a program: drop the remainder, or pad to one size."
            )
        has_structure = _tree.structure(self._full_shapes) == _tree.structure(batch)
        pairs = zip(jax.tree.leaves(batch), jax.tree.leaves(self._full_shapes), strict=False)
        if not has_structure or not all(_fits_into(*pair, self._example_axis) for pair in pairs):
            raise ValueError(
                f"{self.name}: expected every batch like the first, got another at step "
                f"{self._taken} of epoch {self._epoch}:\n"
                f"{_tree.bullets(_tree.differences(self._full_shapes, batch))}\n"
                "Only the last batch of an epoch may be smaller."
            )

    def _compare_first(self, first: dict[str, Any]) -> list[str]:
        """Compares the run's first batch with the one that its initial state yields now."""
        run_start = {"state": first["state"], "batch": 0, "ended": False}
        try:
            summary_now = self._fetch_first_summary(run_start)
        except Exception as error:
            # A loader of another version, or with other settings, may raise any error.
            return [f"the saved state of the data was rejected: {type(error).__name__}: {error}"]
        if summary_now is None:
            return ["batches: saved with some, now none"]
        changed = differences(first["batch"], summary_now, "the first batch")
        # If two passes from one state differ from each other, the data are not other data: they
        # are random.
        if changed and summary_now != self._fetch_first_summary(run_start):
            warn(
                f"{self.name}: {_repr.class_with_article(self.data)} gives other numbers each "
                "time, even from the same state: it draws random numbers that are not part of its "
                "state. The run resumes, but not bit for bit.",
            )
            return []
        return changed

    def _fetch_first_summary(self, position: dict[str, Any]) -> Summary | None:
        """Opens a pass at a position; returns a summary of the first batch that it fetches."""
        self._open(0, 0, position)
        self._full_shapes = None
        self.peek()
        assert self._position is not None
        return self._position.first_seen

    def _skip_batches(
        self, first: Summary, epoch: int, batch: int, saved: dict[str, Any]
    ) -> list[str]:
        """Continues in data without a state: fetches an epoch's first batches again."""
        is_list = isinstance(self.data, list | tuple)
        if first and batch and not is_list and not saved["ended"]:
            warn(
                f"{self.name}: {_repr.class_with_article(self.data)} does not report its position. "
                f"Its first {batch} batches are fetched again and skipped; the batches after them "
                "are the same only if it yields the same batches in every pass.",
            )
        self._open(epoch, batch, saved)
        self.peek()
        assert self._position is not None
        # Nothing was fetched if the epoch was over.
        if self._position.first_seen is None:
            return []
        # The numbers of a generator may differ in every pass, which the warning has mentioned.
        return differences(
            first, self._position.first_seen, "the first batch", compares_numbers=is_list
        )


def _fits_into(x: Any, full: Any, axis: int) -> bool:
    """Returns True if an array is like another one, with at most as many examples along an axis."""
    if (len(x.shape), x.dtype) != (len(full.shape), full.dtype):
        return False
    lengths = enumerate(zip(x.shape, full.shape, strict=True))
    return all(n == most or (i == axis and n < most) for i, (n, most) in lengths)
