"""Batches of everything that Keras's `fit` accepts as data."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import keras
import numpy as np

from bridge import keras_private
from functrain.internal import (
    Batches,
    Chunk,
    Local,
    LocalBatches,
    Lookahead,
    OnDevice,
    PyTree,
    chunk_placer,
    copy_batch,
    has_room,
    host_batch,
    is_cheap_to_read,
    pad_chunk,
    require,
    require_divisible,
    require_integers_fit,
    signature,
    stack_batches,
)


class BatchEvents(NamedTuple):
    """The batch events that Keras has around a step: a pair for each steps_per_execution steps.

    Attributes:
      begin: The number of the batch event that begins before this step, or None.
      end: The number of the batch event that ends after this step, or None.
    """

    begin: int | None
    end: int | None


# A batch of Keras's iterator, of arrays only its rows, a range or `i64[B]`; and its batch events.
KerasBatch: TypeAlias = tuple[Any, BatchEvents]


class KerasBatches(Batches):
    """The batches of Keras's own iterator over epochs. Any two may have different sizes.

    Args:
      epochs: Keras's EpochIterator, from `keras_private.data.epochs`.
      place: Puts a chunk on the devices; None leaves that to others.

    Attributes:
      arrays: The data if they are dense arrays, whose rows are taken for a whole chunk; else None.
    """

    # The argument that errors about the data name.
    name = "x"

    def __init__(self, epochs: Any, place: Callable[[PyTree], PyTree] | None) -> None:
        self.data, self._place = epochs, place
        self.arrays: keras_private.data.ArrayBatches | None = epochs.arrays
        self.steps = self.full_steps = epochs.num_batches
        # With `steps_per_epoch`, an epoch may end before the smaller batch.
        has_last_batch = self.steps == epochs.data_adapter.num_batches
        if has_last_batch and self.arrays is not None and len(self.arrays.sizes) > 1:
            self.full_steps = self.steps - 1
        # The arrays on the device; None if they are not there. The first run decides.
        self._on_device: OnDevice | None = None
        self._is_decided = place is not None or self.arrays is None
        self._items: Lookahead[KerasBatch] = Lookahead(())
        # True while the first batch of a chunk is fetched.
        self._fetches_first = False
        self._epoch_position: dict[str, Any] = {"fetched": 0}
        self._resume_state: dict[str, Any] | None = None

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins the next epoch; after `restore`, continues it at a batch."""
        if self.data.is_tracked:
            self._epoch_position = keras_private.data.epoch_position(self.data)
        self.data.missing = None
        items = self._with_events()
        if self._resume_state is not None and batch:
            items = self._skip(items, batch, self._resume_state)
        # A value that is equal for two batches that can be stacked.
        can_stack = signature if self.arrays is None else len
        self._items = Lookahead(items, lambda item: can_stack(item[0]))
        self._resume_state = None

    def peek(self) -> PyTree | None:
        """Fetches the next batch and returns its shapes; None at the end of the epoch."""
        self._fetches_first = not self._items.has_next
        item = self._items.peek()
        self._fetches_first = False
        if item is None or self.arrays is None:
            return None if item is None else item[0]
        return self.arrays.shapes(len(item[0]))

    def take(self, k: int, limit: int) -> Chunk:
        """Returns a chunk of the next batches that can be stacked."""
        if self.arrays is None:
            chunk, events = self._stack(k, limit)
        else:
            rows, events = map(list, zip(*self._items.take(limit), strict=True))
            if self._on_device is not None:
                chunk = self._on_device.take(np.stack(list(map(np.asarray, rows))), k)
            else:
                batches = self.arrays.take(rows)
                require_integers_fit(batches, "data")
                chunk = pad_chunk(batches, k)
        if self._place is not None:
            chunk = self._place(chunk)
        return Chunk(chunk, k, len(events), events)

    def _stack(self, k: int, limit: int) -> tuple[PyTree, list[BatchEvents]]:
        """Stacks the next batches, and returns their events.

        Each batch is copied before the next one is fetched, perhaps into the same memory.
        """
        batch_events: list[BatchEvents] = []

        def contents() -> Iterator[PyTree]:
            for content, events in self._items.take(limit):
                batch_events.append(events)
                yield content

        return stack_batches(contents(), k)[0], batch_events

    def put_on_device(self, room: int) -> None:
        """Puts dense arrays on the device if they fit, and no distribution divides them."""
        if self._is_decided:
            return
        self._is_decided, arrays = True, self.arrays
        assert arrays is not None
        # The sizes first: all of the data may be cast, which takes as much memory again.
        if arrays.are_cheap_to_read() and has_room(arrays.all_shapes(), room, self.name):
            data = arrays.all()
            require_integers_fit(data, "data")
            self._on_device = OnDevice(data)

    def known_shapes(self) -> list[PyTree]:
        """Returns the shapes of a batch of full size and of a smaller one, if data are arrays."""
        return [] if self.arrays is None else list(map(self.arrays.shapes, self.arrays.sizes))

    def track(self) -> None:
        """Begins to note the position and the random state that lead to it."""
        self.data.is_tracked = True

    def fingerprint(self) -> dict[str, Any]:
        """Returns what distinguishes the data from others."""
        return keras_private.data.fingerprint(self.data)

    def state(self, *, epoch_is_over: bool) -> dict[str, Any]:
        """Returns the position in the data, and the random state that leads there."""
        if epoch_is_over:
            return {"place": keras_private.data.epoch_position(self.data)}
        return {
            "place": self._epoch_position,
            "first": self.data.random_state,
            "ahead": int(self._items.has_next),
        }

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Moves to the epoch of the checkpoint; the next `begin` continues at its batch."""
        keras_private.data.restore_position(self.data, state["place"])
        if state["place"]["fetched"]:
            # A pass that began in an earlier epoch was drawn again, up to this one, just now.
            state = {**state, "first": keras_private.data.random_state()}
        self._resume_state = state
        return []

    def _skip(
        self, items: Iterator[KerasBatch], batches: int, resume_state: dict[str, Any]
    ) -> Iterator[KerasBatch]:
        """Returns the items from a checkpoint on.

        The batches before it are fetched again, from the random state that they had.

        Raises:
          ValueError: There are fewer of them.
        """
        # The callbacks and the layers have drawn since the epoch began. So the order is drawn from
        # the state at its begin, and the current state is put back.
        current_state = keras_private.data.random_state()
        if resume_state["first"] is not None:
            keras_private.data.set_random_state(resume_state["first"])
        keras_private.data.skip(items, batches)
        # A batch that was fetched before the checkpoint must be drawn from that state as well.
        fetched_ahead = list(itertools.islice(items, resume_state["ahead"]))
        keras_private.data.set_random_state(current_state)
        return itertools.chain(fetched_ahead, items)

    def _with_events(self) -> Iterator[KerasBatch]:
        """Yields every batch of an epoch with its batch events."""
        epochs = self.data
        with epochs.catch_stop_iteration():
            for begin, end, iterator in epochs:
                if self._fetches_first and epochs.before_fetch is not None:
                    epochs.before_fetch(begin)
                contents = map(self._host_batch, iterator) if self.arrays is None else iterator
                group = list(itertools.islice(contents, epochs.steps_per_execution))
                last = len(group) - 1
                for i, content in enumerate(group):
                    events = BatchEvents(None if i else begin, end if i == last else None)
                    yield content, events
                if not group:
                    epochs.missing = begin
                    # catch_stop_iteration waits for this to give Keras's warning.
                    raise StopIteration

    def _host_batch(self, batch: PyTree) -> PyTree:
        """Returns a batch of arrays on the host or of jax."""
        batch = host_batch(batch, "data")
        # Those of an execution are fetched before one is used, and the source may reuse its memory.
        return copy_batch(batch) if self.data.steps_per_execution > 1 else batch


def keras_batches(
    model: keras.Model, data: Any, batch_size: Any, steps: Any, *, trains: bool, **options: Any
) -> Batches:
    """Returns the batches of everything that `fit` accepts.

    Args:
      model: The model, for its `steps_per_execution`.
      data: x, y and sample_weight; all but the first may be None. With `Local`, each process has
        its part of all three.
      batch_size: Examples per step, or None.
      steps: Steps per epoch, or None.
      trains: True requires that the devices divide every batch evenly.
      **options: shuffle and class_weight.
    """
    x, y, sample_weight = data
    local = x if isinstance(x, Local) else None
    x = x.data if isinstance(x, Local) else x
    has_data = any(leaf is not None for leaf in keras.tree.flatten(x))
    advice = "A generator of batches goes into x, and yields (inputs, targets)."
    require(has_data, "x", "arrays, a dataset, a loader or a generator", x, advice)
    for name, part in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        _require_numbers(name, part)
    epochs = keras_private.data.epochs(
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps,
        steps_per_execution=model.steps_per_execution,
        **{"shuffle": False, **options},
    )
    require(epochs.num_batches != 0, "x", "at least one batch", x)
    distribution = keras.distribution.distribution()
    is_placed = distribution is not None and local is None
    batches: Batches = KerasBatches(
        epochs, _placer(distribution, not trains) if is_placed else None
    )
    if local is not None:
        # It joins the parts of all processes, and puts them on the devices.
        batches = LocalBatches(batches, local)
    if distribution is not None and trains:
        require_divisible(batches, distribution.get_data_layout((1,)).backend_layout)
    return batches


def _require_numbers(name: str, data: Any) -> None:
    """Raises TypeError unless data in memory are arrays of numbers, without strings and masks.

    Raises ValueError for integers that jax would truncate.
    """
    for leaf in keras.tree.flatten(data):
        is_masked = isinstance(leaf, np.ma.MaskedArray)
        advice = "Pass x.filled(0), and weights for what is masked as sample_weight."
        require(not is_masked, name, "arrays without a mask", leaf, advice, error=TypeError)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            # All other arrays are checked chunk by chunk, since reading them all may take long.
            if is_cheap_to_read(leaf):
                require_integers_fit(leaf, name)
        elif leaf is not None and _holds_strings(leaf):
            raise TypeError(
                f"{name}: expected numbers, got strings, on which a model cannot be trained. "
                "Convert labels with classes, y = np.unique(y, return_inverse=True) or "
                "keras.layers.StringLookup, texts with keras.layers.TextVectorization."
            )
        # Keras's own errors show all of a list, and no name of an array of objects.
        is_number = isinstance(leaf, bool | int | float)
        advice = f"Pass np.asarray({name}, dtype), or pad rows of unequal length first."
        require(not is_number, name, "an array", data, advice, error=TypeError)
        is_object = isinstance(leaf, np.ndarray) and leaf.dtype.kind == "O"
        require(not is_object, name, "an array of numbers", leaf, advice, error=TypeError)


def _holds_strings(leaf: Any) -> bool:
    """Returns True for a string, and for an array or a table with one in its first rows."""
    # A DataFrame has a dtype for each column.
    is_table = hasattr(leaf, "dtypes") and hasattr(leaf, "columns")
    kind = getattr(getattr(leaf, "dtype", None), "kind", "")
    if not is_table and kind not in {"O", "S", "U", "T"}:
        return isinstance(leaf, str | bytes)
    rows = np.asarray(leaf[:8] if np.ndim(leaf) else leaf)
    return any(isinstance(value, str | bytes) for value in rows.reshape(-1).tolist())


def _placer(distribution: Any, replicates: bool) -> Callable[[PyTree], PyTree]:
    """Returns a function that puts stacked batches where `keras.distribution` wants them.

    If there are several processes, each of them has the same batches, and takes the part of its
    devices.

    Args:
      distribution: The distribution.
      replicates: True gives all devices the whole of a batch that they do not divide.
    """
    placers: dict[Any, Any] = {}

    def put(path: Any, x: Any) -> Any:
        sharding = distribution.get_data_layout(x.shape[1:]).backend_layout
        # A placer compares its first chunk over all processes, so one is kept for each leaf.
        placer: Any = chunk_placer(sharding, replicates=replicates)
        return placers.setdefault((path, sharding.spec), placer)(x)

    return lambda batches: jax.tree_util.tree_map_with_path(put, batches)
