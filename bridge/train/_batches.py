"""Batches of whatever Keras's `fit` takes as data."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge._randomness import random_state, set_random_state
from functrain.internal import (
    Batches,
    Chunk,
    Local,
    LocalBatches,
    PyTree,
    batch_signature,
    batch_size,
    chunk_placer,
    host_batch,
    is_cheap_to_read,
    pad_chunk,
    require_integers_fit,
    stack_batches,
)


class Mark(NamedTuple):
    """The batch events that Keras has around a step: a pair for each steps_per_execution steps."""

    begin: int | None
    end: int | None


class KerasBatch(NamedTuple):
    """A batch of Keras's iterator.

    Attributes:
      content: The batch; or its rows, a slice or `i64[B]`, if it is not taken from arrays yet.
      source: The arrays to take it from; None for a batch that was made.
      examples: Examples in it, if its rows are taken from arrays.
      mark: Its batch events.
    """

    content: Any
    source: keras_private.data.ArrayBatches | None = None
    examples: int = 0
    mark: Mark | None = None

    def arrays(self) -> PyTree:
        """Returns the batch."""
        return self.content if self.source is None else self.source.take(self.content)

    def shapes(self) -> PyTree:
        """Returns the shapes of the batch, without taking it."""
        return self.content if self.source is None else self.source.shapes(self.examples)


class KerasBatches(Batches):
    """The batches of Keras's own iterator over epochs. Their sizes may differ anywhere.

    Args:
      epochs: Keras's EpochIterator, from `keras_private.data.epochs`.
      place: Puts a chunk on the devices.
    """

    name = "x"

    def __init__(self, epochs: Any, place: Callable[[PyTree], PyTree]) -> None:
        self.data, self._place = epochs, place
        self.steps = epochs.num_batches
        self._items: Iterator[KerasBatch] = iter(())
        self._next: KerasBatch | None = None
        self._error: Exception | None = None
        self._epoch_began: dict[str, Any] = {"fetched": 0}
        self._resume: dict[str, Any] | None = None

    @property
    def full_steps(self) -> int | None:
        """Batches of full size in an epoch, as far as that is known."""
        return keras_private.data.full_batches(self.data)

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins the next epoch; or continues in it, where `restore` said."""
        self._epoch_began = keras_private.data.epoch_position(self.data)
        self._next = self._error = self.data.missing = None
        self._items = self._marked()
        if self._resume is not None and batch:
            self._leave_out(batch, self._resume)
        self._resume = None

    def peek(self) -> PyTree | None:
        """Returns the shapes of the next batch, which is fetched for that."""
        if self._next is None:
            if self._error is not None:
                raise self._error
            self._next = next(self._items, None)
        return None if self._next is None else self._next.shapes()

    def take(self, k: int, limit: int) -> Chunk:
        """Returns a chunk of the next batches of one kind."""
        first = self._next
        assert first is not None, "peek comes first"
        self._next = None
        items, marks = itertools.islice(self._alike(first), limit), []
        if first.source is None:

            def contents() -> Iterator[PyTree]:
                for item in items:
                    marks.append(item.mark)
                    yield item.content

            chunk, steps = stack_batches(contents(), k)
            examples = batch_size(first.content)
        else:
            taken = list(items)
            marks, steps, examples = [item.mark for item in taken], len(taken), first.examples
            chunk = pad_chunk(_rows(first.source, taken), k)
        return Chunk(self._place(chunk), k, steps, examples, marks)

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells the data from others."""
        return keras_private.data.fingerprint(self.data)

    def state(self, *, epoch_is_over: bool) -> dict[str, Any]:
        """Returns where the data are."""
        if epoch_is_over:
            return {"place": keras_private.data.epoch_position(self.data)}
        return {
            "place": self._epoch_began,
            "first": self.data.random_state,
            "ahead": int(self._next is not None),
        }

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Goes to the epoch that was under way; the next `begin` continues at its batch."""
        keras_private.data.restore_position(self.data, state["place"])
        self._resume = state
        return []

    def _leave_out(self, batches: int, resume: dict[str, Any]) -> None:
        """Fetches the batches before a checkpoint again, with the randomness they had.

        Raises:
          ValueError: There are fewer of them.
        """
        now = random_state()
        if resume["first"] is not None:
            set_random_state(resume["first"])
        left_out = sum(1 for _ in itertools.islice(self._items, batches))
        if left_out < batches:
            raise ValueError(
                f"x: expected the {batches} batches of the epoch that were taken before the "
                f"checkpoint, got {left_out}. The data are not those that were saved."
            )
        ahead = list(itertools.islice(self._items, resume["ahead"]))
        set_random_state(now)
        self._items = itertools.chain(ahead, self._items)

    def _alike(self, first: KerasBatch) -> Iterator[KerasBatch]:
        """Yields a batch and those after it that can be stacked with it."""
        yield first
        expected = _kind(first)
        try:
            for item in self._items:
                if _kind(item) != expected:
                    self._next = item
                    return
                yield item
        except Exception as error:  # raised after the batches before it were handed out
            self._error = error

    def _marked(self) -> Iterator[KerasBatch]:
        """Yields every batch of an epoch with its batch events."""
        epochs = self.data
        with epochs.catch_stop_iteration():
            for begin, end, iterator in epochs:
                group = list(itertools.islice(iterator, epochs.steps_per_execution))
                last = len(group) - 1
                for i, item in enumerate(group):
                    yield item._replace(mark=Mark(None if i else begin, end if i == last else None))
                if not group:
                    epochs.missing = begin
                    raise StopIteration  # which Keras's own warning waits for


def _kind(item: KerasBatch) -> Any:
    return item.examples if item.source is not None else batch_signature(item.content)


def _rows(source: keras_private.data.ArrayBatches, items: list[KerasBatch]) -> PyTree:
    """Takes the rows of a chunk at once; rows next to one another are not copied."""
    rows = [item.content for item in items]
    if isinstance(rows[0], slice):
        taken = source.take(slice(rows[0].start, rows[-1].stop))
    else:
        taken = source.take(np.concatenate(rows))
    require_integers_fit(taken, "data")
    n = len(rows)
    return jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), taken)


def keras_batches(
    model: keras.Model, data: Any, batch_size: Any, steps: Any, *, trains: bool, **more: Any
) -> Batches:
    """Returns the batches of whatever `fit` takes.

    Args:
      model: The model, for its `steps_per_execution`.
      data: x, y and sample_weight; all but the first may be None. Of `Local`, each process has
        its part of all three.
      batch_size: Examples per step, or None.
      steps: Steps per epoch, or None.
      trains: Whether the devices have to divide every batch.
      **more: shuffle and class_weight.

    Raises:
      ValueError: What Keras raises, there is no batch at all, or an array holds integers that jax
        would cut to 32 bits.
    """
    x, y, sample_weight = data
    local = x if isinstance(x, Local) else None
    x = x.data if isinstance(x, Local) else x
    for name, part in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        require_integers_fit(keras.tree.map_structure(_if_read_now, part), name)
    epochs = keras_private.data.epochs(
        passes,
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps,
        steps_per_execution=model.steps_per_execution,
        **{"shuffle": False, **more},
    )
    if epochs.num_batches == 0:
        raise ValueError(
            f"x: expected at least one batch, got {type(x).__name__} without any "
            f"({_shapes(x)}). The model is unchanged."
        )
    if trains:
        _require_divisible(epochs.data_adapter, 1 if local is None else local.processes)
    if local is not None:
        return LocalBatches(KerasBatches(epochs, lambda chunk: chunk), local)
    return KerasBatches(epochs, _placement(trains=trains))


def _if_read_now(x: Any) -> Any:
    """Returns an array in memory, and None for what is looked at chunk by chunk."""
    return x if isinstance(x, np.ndarray) and is_cheap_to_read(x) else None


def _require_divisible(adapter: Any, parts: int) -> None:
    """Raises ValueError for batches of arrays that the devices do not divide."""
    distribution = keras.distribution.distribution()
    if distribution is None or keras_private.data.array_batches(adapter) is None:
        return
    for what, own in (("", adapter.batch_size), ("last ", adapter.partial_batch_size)):
        if size := (own or 0) * parts:
            where = distribution.get_data_layout((size,)).backend_layout
            try:
                where.shard_shape((size,))
            except ValueError as error:
                raise ValueError(
                    f"x: expected batches that divide over {where.spec} of the mesh "
                    f"{dict(where.mesh.shape)}, got a {what}batch of {size}. Take another "
                    "batch_size, or leave some examples out. The model is unchanged."
                ) from error


def _shapes(x: Any) -> str:
    shapes = [str(tuple(leaf.shape)) for leaf in keras.tree.flatten(x) if hasattr(leaf, "shape")]
    return f"of shape {', '.join(shapes)}" if shapes else "of length 0"


def passes(adapter: Any) -> Callable[[], Iterator[KerasBatch]]:
    """Returns a function that begins a pass over the batches of a data adapter."""
    arrays = keras_private.data.array_batches(adapter)
    if arrays is None:
        return lambda: (
            KerasBatch(host_batch(batch, "data")) for batch in adapter.get_jax_iterator()
        )
    return lambda: (KerasBatch(rows, arrays, size) for rows, size in arrays)


def _placement(*, trains: bool) -> Callable[[PyTree], PyTree]:
    """Returns a function that puts stacked batches where `keras.distribution` wants them.

    Over several processes each of them has the same batches, and takes its own devices' part.
    Outside of training, all devices get the whole of a batch that they do not divide.
    """
    distribution = keras.distribution.distribution()
    places: dict[Any, Callable[[PyTree], PyTree]] = {}

    def put(x: Any) -> Any:
        where = distribution.get_data_layout(x.shape[1:]).backend_layout
        place = chunk_placer(where, replicates=not trains)
        return places.setdefault(where.spec, place)(x)

    return lambda batches: batches if distribution is None else jax.tree.map(put, batches)
