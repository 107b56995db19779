"""Batches of an iterable; each is copied once, into its chunk."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.data._arrays import host_batch, require_no_number_lists
from functrain.data._batches import Batches, Chunk, ShortPassError, shapes
from functrain.data._iterator_position import IteratorPosition, position
from functrain.data._lookahead import Lookahead
from functrain.data._same_data import Summary, differences, summary
from functrain.data._stack import copy_batch, stack_batches


class IteratorBatches(Batches):
    """Batches of an iterable.

    Batches may have a few different shapes, such as a smaller last one, or sequences of several
    lengths. Structure, dtypes and ranks must be those of the run's first batch. If the iterator
    raises, the batches before the error are returned first.

    Args:
      data: The iterable.
      name: The argument that it was passed as, for errors.
    """

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name = data, name
        self.is_iterator = isinstance(data, Iterator)
        # Data without a length raise either of these.
        with contextlib.suppress(TypeError, NotImplementedError):
            self.steps = self.full_steps = len(data)
        require(self.steps != 0, name, "at least one batch", data)
        self._batches: Lookahead[PyTree] = Lookahead(())
        # True after `first` or `restore`, until `begin` continues there.
        self._is_open = False
        # The shapes of the run's first batch.
        self._full_shapes: PyTree | None = None
        self._epoch = 0
        self._position = IteratorPosition(data)
        self._last_summary: Summary = {}

    def first(self) -> PyTree | None:
        """Returns the first batch; the next `begin` continues with it."""
        # Batches of other data may be fetched before this one is taken, from the same memory.
        batch = copy_batch(super().first())
        self._batches.replace_next(batch)
        self._is_open = True
        return batch

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch; batches before the given one are fetched and skipped."""
        if not self._is_open:
            self._open(epoch, batch, position())
        self._is_open = False

    def peek(self) -> PyTree | None:
        """Fetches the next batch if necessary, and returns it.

        Raises:
          ValueError: It differs from the run's first batch in structure, dtypes or ranks.
        """
        batch = self._batches.peek()
        if batch is not None and _kinds(batch) != _kinds(self._full_shapes):
            raise ValueError(
                f"{self.name}: expected every batch like the first, got another at step "
                f"{self._position.taken} of epoch {self._epoch}:\n"
                f"{_tree.bullets(_tree.differences(self._full_shapes, batch))}\n"
                "Batches may differ in their shapes, but not in structure, dtypes or ranks."
            )
        return batch

    def take(self, k: int, limit: int) -> Chunk:
        """Copies the next batches that can be stacked into a chunk."""
        batches, steps = stack_batches(self._batches.take(limit), k)
        self._position.taken += steps
        return Chunk(batches, k, steps)

    def known_shapes(self) -> list[PyTree]:
        """Returns the first and last batch of a list; of other data, the run's first batch."""
        # In any other iterable, reading a batch would use it up.
        if not isinstance(self.data, list | tuple):
            return [] if self._full_shapes is None else [self._full_shapes]
        return [host_batch(self.data[i], self.name) for i in (0, -1)]

    def track(self) -> None:
        """Begins to track the position of the iterator."""
        self._position.is_tracked = True
        # A long or endless dataset of grain has a length, but may have no batch at its end.
        with contextlib.suppress(Exception):
            self._last_summary = summary(host_batch(self.data[len(self.data) - 1], self.name))

    def state(self, *, epoch_is_over: bool) -> dict[str, Any] | None:
        """Returns the position of the iterator, and what tells other data apart when it resumes.

        `first` is the iterator's state when the run began and a summary of its first batch; `last`
        is a summary of the last batch, if the data can be indexed.
        """
        if self._position.run_start is None:
            return None
        # With a batch fetched ahead, the iterator's state is already past that batch. Then the
        # last saved position is used, and the batches since then are skipped.
        if not (epoch_is_over or self._batches.is_ahead):
            self._position.save()
        saved = self._position.next_epoch() if epoch_is_over else self._position.saved
        first, last = self._position.run_start, self._last_summary
        return {"position": saved, "first": first, "last": last}

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Continues at a saved position, after comparing the data with those of the saved run."""
        if state is None:
            return []
        first, last, saved = state["first"], state["last"], state["position"]
        self._position.run_start = first
        changed = differences(last, self._last_summary, "the last batch")
        if changed:
            return changed
        if first["state"] is None:
            changed = self._skip_batches(first["batch"], epoch, batch, saved)
        else:
            # Before the data are opened at the saved position, since this opens them at the start.
            changed = self._compare_first(first)
            if not changed:
                self._open(epoch, batch, saved)
        self._is_open = True
        return changed

    def _open(self, epoch: int, batch: int, saved: dict[str, Any]) -> None:
        """Begins a pass at one of its batches.

        Args:
          epoch: Number of the epoch, for errors.
          batch: Number of the batch. The batches between the saved position and this one are
            fetched and skipped.
          saved: A position in a pass over the same data.

        Raises:
          ShortPassError: The pass has fewer batches.
        """
        self._epoch = epoch
        batches = self._host_batches(self._position.begin(saved))
        self._batches = Lookahead(batches)
        count = max(0, batch - saved["batch"])
        skipped = sum(1 for _ in itertools.islice(batches, count))
        self._position.taken += skipped
        if skipped < count:
            raise ShortPassError(
                f"start: expected more than {batch} batches in epoch {epoch} of {self.name}, got "
                f"{self._position.taken}. The data are not those of the first run.",
                self._position.taken,
            )
        if skipped:
            self._position.save()

    def _host_batches(self, iterator: Iterator[Any]) -> Iterator[PyTree]:
        """Yields the batches as arrays; tells the position about the first one and the end."""
        first = self._position.taken
        for number, batch in enumerate(iterator, first):
            # Once a pass is enough: looking at every leaf takes time.
            if number == first:
                require_no_number_lists(batch, f"{self.name}: batch {number}", (list,))
            label = f"batch {number} of epoch {self._epoch} of {self.name}"
            # `peek` returns None at the end of an epoch, so None cannot be a batch.
            advice = "A batch without arrays is an empty tuple, ()."
            require(batch is not None, label, "a batch", None, advice, error=TypeError)
            arrays = host_batch(batch, label)
            if self._full_shapes is None:
                self._full_shapes = shapes(arrays)
            if number == first:
                self._position.record_first(arrays)
            yield arrays
        self._position.ended = True

    def _compare_first(self, first: dict[str, Any]) -> list[str]:
        """Returns how the run's first batch differs from the one that its initial state yields now.

        Random data have no differences, but a warning.
        """
        try:
            summary_now = self._first_summary(first["state"])
        except Exception as error:
            # A loader of another version, or with other settings, may raise any error.
            return [f"the saved state of the data was rejected: {type(error).__name__}: {error}"]
        changed = differences(first["batch"], summary_now, "the first batch")
        # If two passes from one state differ from each other, the data are not other data: they
        # are random.
        if changed and summary_now != self._first_summary(first["state"]):
            warn(
                f"{self.name}: {type(self.data).__name__} gives other numbers each "
                "time, even from the same state: it draws random numbers that are not part of its "
                "state. The run resumes, but not bit for bit.",
            )
            return []
        return changed

    def _first_summary(self, state: Any) -> Summary:
        """Returns a summary of the batch that comes after a state; empty if there is none."""
        self._open(0, 0, position(state))
        self.peek()
        return self._position.first_seen

    def _skip_batches(
        self, first: Summary, epoch: int, batch: int, saved: dict[str, Any]
    ) -> list[str]:
        """Continues in data without a state: fetches an epoch's first batches again."""
        is_list = isinstance(self.data, list | tuple)
        if first and batch and not is_list and not saved["ended"]:
            warn(
                f"{self.name}: {type(self.data).__name__} does not report its position. "
                f"Its first {batch} batches are fetched again and skipped; the batches after them "
                "are the same only if it yields the same batches in every pass.",
            )
        self._open(epoch, batch, saved)
        self.peek()
        # Nothing is fetched if the epoch was over.
        summary_now = first if saved["ended"] else self._position.first_seen
        # The numbers of a generator may differ in every pass, which the warning has mentioned.
        return differences(first, summary_now, "the first batch", compares_numbers=is_list)


def _kinds(batch: PyTree) -> Any:
    """Returns the structure of a batch, and the dtype and the rank of each leaf."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, [(x.dtype, len(x.shape)) for x in leaves]
