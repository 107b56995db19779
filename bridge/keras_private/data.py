"""The batches of everything that `fit` takes."""

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from functrain.internal import is_cheap_to_read


class _Epochs(JAXEpochIterator):  # type: ignore[misc]  # keras has no types
    """Keras's iterator over the steps of epochs, with batches left on the host.

    Attributes:
      given: The data as the user passed them: x, y and sample_weight.
      arrays: The data if they are dense arrays; then rows are yielded in place of batches.
      is_tracked: True for a run that saves, which needs the attributes after this one.
      fetched: Number of batches fetched from the current pass.
      random_state: What `random_state` returned when the first of them was fetched.
      pass_number: The `adapter_epoch` at that time.
      before_fetch: Called with the number of the first batch of a chunk, before it is fetched.
      missing: The number of a batch that was begun, only to find that the data have run out.
    """

    given: Any = None
    arrays: "ArrayBatches | None" = None
    is_tracked = False
    fetched = 0
    random_state: Any = None
    pass_number: int | None = None
    before_fetch: Callable[[int], None] | None = None
    missing: int | None = None

    def batch_of(self, item: Any) -> Any:
        """Returns the batch of an item that the iterator over batches has yielded."""
        if self.arrays is None:
            return item
        return jax.tree.map(lambda x: x[0], self.arrays.take([item]))

    # The base class puts every batch on the devices. Here whole chunks are put there.
    def _get_iterator(self) -> Iterator[Any]:
        self.fetched = 0
        batches = self.data_adapter.get_jax_iterator() if self.arrays is None else self.arrays
        return self._tracked(batches) if self.is_tracked else iter(batches)

    def _tracked(self, batches: Iterable[Any]) -> Iterator[Any]:
        # A checkpoint within the epoch stores this, to draw the same order again.
        self.random_state = random_state()
        self.pass_number = adapter_epoch(self)
        for batch in batches:
            self.fetched += 1
            yield batch


def epochs(**arguments: Any) -> Any:
    """Returns Keras's EpochIterator, which understands all data that `fit` does.

    Subclasses `JAXEpochIterator`, and overrides `_get_iterator`; checked with Keras 3.15.1.
    Without it bridge.fit has to handle steps_per_epoch, generators that end early, PyDataset
    and the like.

    Args:
      **arguments: Those of `EpochIterator`: x, y, sample_weight, batch_size, ...

    Raises:
      ValueError: Keras does not know the data, or they do not fit together.
    """
    distribution = keras.distribution.distribution()
    # Keras divides tf.data over processes, while in bridge.fit every process has the same batches.
    divides = getattr(distribution, "auto_shard_dataset", False)
    if divides:
        distribution.auto_shard_dataset = False
    given = [arguments.get(name) for name in ("x", "y", "sample_weight")]
    try:
        iterator = _Epochs(**arguments)
    except ValueError as error:
        if not str(error).startswith("Unrecognized data type"):
            raise
        kinds = ", ".join(type(data).__name__ for data in given if data is not None)
        raise ValueError(
            "x: expected arrays, beside y and sample_weight, or alone a dataset, a loader of "
            f"Keras, PyTorch or Grain, or a generator, got {kinds}. Pass the arrays of an "
            "ArrayLoader as x and y with batch_size=, and other batches as a generator: "
            "(batch for batch in batches)."
        ) from error
    finally:
        if divides:
            distribution.auto_shard_dataset = True
    iterator.given = given
    adapter = iterator.data_adapter
    # A subclass may yield other batches than these arrays.
    if type(adapter) is ArrayDataAdapter and all(
        map(_is_dense, keras.tree.flatten(adapter._inputs))
    ):
        iterator.arrays = ArrayBatches(adapter)
    return iterator


def epoch_position(epochs: Any) -> dict[str, Any]:
    """Returns the position of `epochs` between two epochs, for `restore_position`.

    Reads `EpochIterator._current_iterator` and `_steps_seen`; checked with Keras 3.15.1. With
    `steps_per_epoch` one iterator lasts for several epochs.
    """
    is_shared = epochs.steps_per_epoch is not None and epochs._current_iterator is not None
    return {
        # Otherwise each epoch begins a new pass, and no batch has to be fetched again.
        "fetched": epochs.fetched if is_shared else 0,
        "steps_seen": epochs._steps_seen,
        "randomness": epochs.random_state,
        "pass_number": epochs.pass_number,
        "adapter_epoch": adapter_epoch(epochs),
    }


def adapter_epoch(epochs: Any) -> int | None:
    """Returns the number from which Keras 3.16 draws the order of arrays; None before 3.16.

    Reads `ArrayDataAdapter._epoch`, which counts the epochs; checked with Keras 3.16.0.dev. Without
    it a resumed run begins with the order of the first epoch.
    """
    number = getattr(epochs.data_adapter, "_epoch", None)
    return None if number is None else int(number)


def restore_position(epochs: Any, position: dict[str, Any]) -> None:
    """Moves new epochs to a position, by fetching all batches before it again.

    Sets `EpochIterator._current_iterator` and `_steps_seen`, and the `_epoch` that `adapter_epoch`
    reads; checked with Keras 3.15.1. Without it a run with `steps_per_epoch` resumes with the first
    batches of its data.

    Raises:
      ValueError: The data have fewer batches.
    """
    if position["fetched"]:
        # The order of the batches is drawn again, so it has to be drawn from the same random state.
        epochs.data_adapter._epoch = position["pass_number"]
        set_random_state(position["randomness"])
        epochs._current_iterator = epochs._get_iterator()
        epochs._steps_seen = position["steps_seen"]
        skip(epochs._current_iterator, position["fetched"])
    epochs.data_adapter._epoch = position["adapter_epoch"]


def skip(batches: Iterator[Any], count: int) -> None:
    """Fetches the batches before a checkpoint again. Public names only.

    Raises:
      ValueError: There are fewer of them.
    """
    skipped = sum(1 for _ in itertools.islice(batches, count))
    if skipped < count:
        raise ValueError(
            f"x: expected the {count} batches that were taken before the checkpoint, "
            f"got {skipped}. The data are not those that were saved."
        )


def fingerprint(epochs: Any) -> dict[str, Any]:
    """Returns what distinguishes the data of `epochs` from others, as far as Keras knows it.

    Reads `ArrayDataAdapter._num_samples`, `_batch_size` and `_shuffle`; checked with Keras 3.15.1.
    Without it a run resumes with other data, and nothing tells the user.
    """
    adapter = epochs.data_adapter
    # A resumed run compares these with the checkpoint's, and says which differ. Where the adapter
    # does not know the number of batches, `num_batches` changes when the first epoch ends.
    batches = epochs.steps_per_epoch or adapter.num_batches
    steps = {"batches": batches, "steps_per_epoch": epochs.steps_per_epoch}
    details = {"data": type(adapter).__name__, **steps}
    if type(adapter) is not ArrayDataAdapter:
        return details
    example = () if epochs.arrays is None else epochs.arrays.shapes(1)
    return {
        **details,
        "examples": int(adapter._num_samples),
        "batch_size": int(adapter._batch_size),
        "shuffle": str(adapter._shuffle),
        "arrays": [f"{x.dtype}{list(x.shape[1:])}" for x in jax.tree.leaves(example)],
    }


def _is_dense(x: Any) -> bool:
    """Returns True if batches of an array can be stacked."""
    # Most are NumPy arrays, and converting one may cast it as a whole. JAX accepts arrays in the
    # byte order of the machine only.
    if x is None or isinstance(x, np.ndarray):
        return x is None or x.dtype.isnative
    # Sparse arrays, and tensors of TensorFlow or PyTorch, go through Keras's own iterator.
    dense = (
        array_slicing.NumpySliceable,
        array_slicing.PandasDataFrameSliceable,
        array_slicing.PandasSeriesSliceable,
    )
    return isinstance(_sliceable(x), dense)


class ArrayBatches:
    """The dense arrays of an `ArrayDataAdapter`, and the order of one pass over them.

    Reads `ArrayDataAdapter._inputs`, `_num_samples` and `_batch_size`, and calls `_get_iterator`
    and `array_slicing.convert_to_sliceable`; checked with Keras 3.15.1. Without it batches are made
    one by one and then stacked, which takes longer than a small model's step.

    Attributes:
      sizes: The number of rows in a batch, and that in a smaller last one.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        size, examples = int(adapter._batch_size), int(adapter._num_samples)
        has_smaller = examples > size and examples % size
        self.sizes = [size, examples % size] if has_smaller else [min(size, examples)]
        self._sliceables: Any = None
        self._first_row: Any = None

    def __iter__(self) -> Iterator[Any]:
        """Yields the rows of every batch, a range or `i64[B]`, in the order of `model.fit`."""
        # For each pass, as in Keras: this may cast the arrays, which callbacks may change in place.
        self._sliceables = _sliceable(self._adapter._inputs)
        # Keras's own loop slices one leaf, 0, by a function that returns the rows instead: whole
        # chunks are then taken at once.
        for rows in self._adapter._get_iterator(lambda leaf, indices: indices, 0):
            yield range(rows.start, rows.stop) if isinstance(rows, slice) else rows

    def shapes(self, size: int) -> Any:
        """Returns the shapes and dtypes of a batch of `size` rows."""
        # Taking a row shows the dtypes after Keras's conversion, such as floatx for floats.
        if self._first_row is None:
            first = _map(lambda x: x[:1], self._adapter._inputs)
            self._first_row = _rows(_sliceable(first), slice(0, 1))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), self._first_row
        )

    def all(self) -> Any:
        """Returns all rows, as Keras passes them to a step."""
        return _rows(_sliceable(self._adapter._inputs), slice(None))

    def all_shapes(self) -> Any:
        """Returns the shapes and dtypes of all rows, without reading or casting them."""
        return self.shapes(int(self._adapter._num_samples))

    def are_cheap_to_read(self) -> bool:
        """Returns True if all arrays are in memory, and none is a view of overlapping windows."""
        arrays = [x for x in jax.tree.leaves(self._adapter._inputs) if isinstance(x, np.ndarray)]
        return all(map(is_cheap_to_read, arrays))

    def take(self, batches: list[Any]) -> Any:
        """Returns the rows of several batches, stacked; a pass must have begun.

        Rows next to one another are not copied.
        """
        n, is_contiguous = len(batches), isinstance(batches[0], range)
        rows = (
            slice(batches[0].start, batches[-1].stop) if is_contiguous else np.concatenate(batches)
        )
        return jax.tree.map(
            lambda x: x.reshape(n, len(x) // n, *x.shape[1:]), _rows(self._sliceables, rows)
        )


_sliceable = functools.partial(array_slicing.convert_to_sliceable, target_backend="jax")
_map = functools.partial(keras.tree.map_structure, none_is_leaf=False)


def _rows(sliceables: Any, rows: Any) -> Any:
    """Returns rows of all arrays, as Keras passes them to a step."""
    return _map(lambda x: x.convert_to_jax_compatible(x[rows]), sliceables)


def split_validation(arrays: Any, validation_split: float) -> tuple[Any, Any]:
    """Returns the arrays without their last part, and that part.

    Calls `array_slicing.train_validation_split`; checked with Keras 3.15.1. Without it
    `validation_split` would need slicing of everything `fit` takes as an array.
    """
    training, validation = array_slicing.train_validation_split(
        arrays, validation_split=validation_split
    )
    return training, validation


def random_state() -> dict[str, Any]:
    """Returns the states of NumPy's and Python's global generators, with which Keras shuffles.

    Public names only.
    """
    version, words, next_gauss = random.getstate()
    # A checkpoint stores arrays, not tuples of 625 integers.
    python_state = [version, np.asarray(words, np.uint32), next_gauss]
    return {"numpy": np.random.get_state(legacy=False), "python": python_state}


def set_random_state(state: dict[str, Any]) -> None:
    """Restores the states that `random_state` returned. Public names only."""
    np.random.set_state(state["numpy"])
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), next_gauss))
