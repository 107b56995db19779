"""The batches of whatever `fit` takes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from bridge._randomness import put_randomness, randomness


class _Epochs(JAXEpochIterator):  # type: ignore[misc]  # keras has no types
    """Keras's iterator over the steps of epochs, with batches left on the host.

    Attributes:
      begin: Makes the iterator over the batches of one pass.
      fetched: How many batches were fetched from the iterator there is.
      randomness: What `randomness` returned when the first of them was.
      missing: The number of the batch that was begun only to find that there is none.
    """

    begin: Callable[[], Iterator[Any]]
    fetched = 0
    missing: int | None = None
    randomness: Any = None

    def _get_iterator(self) -> Iterator[Any]:
        self.fetched = 0
        return self._counted(self.begin())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.randomness = randomness()
        for batch in batches:
            self.fetched += 1
            yield batch


def epochs(passes: Callable[[Any], Callable[[], Iterator[Any]]], **arguments: Any) -> Any:
    """Returns Keras's EpochIterator, which understands all data that `fit` does.

    Subclasses `JAXEpochIterator`, and overrides `_get_iterator`; checked with Keras 3.15.1.
    Without it bridge.fit has to know steps_per_epoch, generators that end early, PyDataset
    and the like by itself.

    Args:
      passes: Called with the data adapter, returns what begins a pass over its batches.
      **arguments: Of `EpochIterator`: x, y, sample_weight, batch_size, ...
    """
    with _whole():
        found = _Epochs(**arguments)
    found.begin = passes(found.data_adapter)
    return found


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """Switches off that Keras divides data over processes, which it does for tf.data alone."""
    distribution = keras.distribution.distribution()
    before = getattr(distribution, "auto_shard_dataset", False)
    if before:
        distribution.auto_shard_dataset = False
    try:
        yield
    finally:
        if before:
            distribution.auto_shard_dataset = True


def place(epochs: Any) -> dict[str, Any]:
    """Returns where what `epochs` returned is between two epochs, for `go_to`.

    Reads `EpochIterator._current_iterator` and `_steps_seen`; checked with Keras 3.15.1. With
    `steps_per_epoch` one iterator lasts for several epochs.
    """
    lasts = epochs.steps_per_epoch is not None and epochs._current_iterator is not None
    if not lasts or not epochs.fetched:
        return {"fetched": 0}
    return {
        "fetched": epochs.fetched,
        "steps_seen": epochs._steps_seen,
        "randomness": epochs.randomness,
    }


def go_to(epochs: Any, found: dict[str, Any]) -> None:
    """Takes new epochs to a place, by fetching all batches before it again.

    Sets `EpochIterator._current_iterator` and `_steps_seen`; checked with Keras 3.15.1. Without
    it a run with `steps_per_epoch` goes on with the first batches of its data.
    """
    if found["fetched"]:
        put_randomness(found["randomness"])
        epochs._current_iterator = epochs._get_iterator()
        epochs._steps_seen = found["steps_seen"]
        for _ in range(found["fetched"]):
            next(epochs._current_iterator)


def described(epochs: Any) -> dict[str, Any]:
    """Returns what tells the data of `epochs` from others, as far as they say.

    Reads `ArrayDataAdapter._num_samples`, `_batch_size`, `_shuffle` and `_inputs`; checked with
    Keras 3.15.1. Without it a run goes on with other data without a word.
    """
    adapter = epochs.data_adapter
    known = {"data": type(adapter).__name__, "batches": epochs.num_batches}
    if epochs.steps_per_epoch is not None:
        known["steps_per_epoch"] = epochs.steps_per_epoch
    if type(adapter) is not ArrayDataAdapter:
        return known
    leaves = [x for x in keras.tree.flatten(adapter._inputs) if x is not None]
    return {
        **known,
        "examples": int(adapter._num_samples),
        "batch_size": int(adapter._batch_size),
        "shuffle": str(adapter._shuffle),
        "arrays": [f"{x.dtype}[{', '.join(map(str, x.shape[1:]))}]" for x in leaves],
    }


def array_batches(adapter: Any) -> "ArrayBatches | None":
    """Returns the data of an adapter where they are arrays held whole, else None.

    Reads `ArrayDataAdapter._inputs`, `_num_samples`, `_batch_size`, `_size` and `_shuffle`, and
    calls `array_slicing.convert_to_sliceable`; checked with Keras 3.15.1. Without it batches are
    made one by one and then stacked, which takes longer than a small model's step.
    """
    if type(adapter) is not ArrayDataAdapter:
        return None
    found = ArrayBatches(adapter)
    return found if found.dense else None


class ArrayBatches:
    """The arrays of an `ArrayDataAdapter`, and the order of one pass over them."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")
        self._row: Any = None

    @property
    def dense(self) -> bool:
        """Whether batches of them can be stacked."""
        kinds = (
            array_slicing.NumpySliceable,
            array_slicing.PandasDataFrameSliceable,
            array_slicing.PandasSeriesSliceable,
        )
        return all(x is None or isinstance(x, kinds) for x in keras.tree.flatten(self._inputs))

    def __iter__(self) -> Iterator[Any]:
        """Yields every batch's rows, a slice or `i64[B]`, and B; draws them as Keras does."""
        adapter = self._adapter
        n, size, shuffle = adapter._num_samples, adapter._batch_size, adapter._shuffle
        order = np.random.permutation(n) if shuffle and shuffle != "batch" else None
        for i in range(adapter._size):
            start, stop = i * size, min((i + 1) * size, n)
            if order is not None:
                yield order[start:stop], stop - start
            elif shuffle:
                yield np.random.permutation(stop - start) + start, stop - start
            else:
                yield slice(start, stop), stop - start

    def shapes(self, size: int) -> Any:
        """Returns the shapes and dtypes of a batch of so many rows."""
        if self._row is None:
            self._row = self.take(slice(0, 1))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), self._row
        )

    def take(self, rows: Any) -> Any:
        """Returns these rows of all arrays, as Keras hands them to a step.

        In the byte order of the machine, since jax takes no other.
        """

        def convert(array: Any) -> Any:
            found = array.convert_to_jax_compatible(array[rows])
            return found.astype(found.dtype.newbyteorder("="), copy=False)

        return keras.tree.map_structure(convert, self._inputs, none_is_leaf=False)


def whole_batches(iterator: Any) -> int | None:
    """Returns how many batches of full size an epoch of `epochs` has, as far as that is known.

    Reads `ArrayDataAdapter.has_partial_batch`, which other adapters raise at; checked with Keras
    3.15.1. Without it "auto" may choose one step too many, whose row of a chunk is never used.
    """
    steps: int | None = iterator.num_batches
    adapter = iterator.data_adapter
    partial = type(adapter) is ArrayDataAdapter and adapter.has_partial_batch
    return max(1, steps - 1) if steps and partial and steps == adapter.num_batches else steps


def split(arrays: Any, validation_split: float) -> tuple[Any, Any]:
    """Returns the arrays without their last part, and that part.

    Calls `array_slicing.train_validation_split`; checked with Keras 3.15.1. Without it
    `validation_split` would need slicing of everything `fit` takes as an array.
    """
    kept, left = array_slicing.train_validation_split(arrays, validation_split=validation_split)
    return kept, left
