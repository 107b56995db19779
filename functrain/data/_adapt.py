"""Converts what users pass as data to `Batches`."""

import copy
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from functrain.common._checks import require
from functrain.data._arrays import require_no_number_lists
from functrain.data._batches import Batches, NoData
from functrain.data._iterator import IteratorBatches
from functrain.data._loader import SeekableLoader
from functrain.data._loader_batches import LoaderBatches
from functrain.data._local import Local, LocalBatches


def as_batches(data: Any, name: str = "data") -> Batches:
    """Converts the data of `fit`, `run`, `evaluate` and `predict` to `Batches`.

    Args:
      data: A loader that can seek, such as `ArrayLoader`; an iterable of batches; either of these
        in `functrain.distributed.local`; `NoData`, which is copied; or other `Batches`, which are
        returned unchanged.
      name: The argument that the data were passed as, for errors.

    Raises:
      TypeError: `data` is something else.
      ValueError: `data` is an empty list.
    """
    if isinstance(data, NoData):
        # A copy, since data and eval_data may be one object, and each has its own position.
        return copy.copy(data)
    if isinstance(data, Batches):
        return data
    if isinstance(data, Local):
        return LocalBatches(as_batches(data.data, name), data)
    # A subclass that iterates in its own way is an iterable like any other.
    if isinstance(data, SeekableLoader) and type(data).__iter__ is SeekableLoader.__iter__:
        return LoaderBatches(data, name)
    _require_iterable(data, name)
    return IteratorBatches(data, name)


def _require_iterable(data: Any, name: str) -> None:
    """Raises TypeError unless data are an iterable of batches: arrays are cut by a loader."""
    is_list = isinstance(data, list | tuple)
    if is_list:
        require(data, name, "at least one batch", data, "Pass a list of batches.")
    # All of these can be iterated, but yield rows, keys, characters or numbers.
    is_array = isinstance(data, dict | np.ndarray | jax.Array | str | bytes)
    is_tuple_of_arrays = isinstance(data, tuple) and any(hasattr(x, "shape") for x in data)
    is_list_of_numbers = is_list and isinstance(data[0], bool | int | float | complex | str)
    is_one_batch = is_array or is_tuple_of_arrays or is_list_of_numbers
    if is_one_batch or not isinstance(data, Iterable):
        raise TypeError(
            f"{name}: expected an ArrayLoader or an iterable of batches, got "
            f"{type(data).__name__}. For arrays: functrain.ArrayLoader((x, y), batch_size); "
            "without data: functrain.NoData(n). Call a generator function."
        )
    if isinstance(data, list | tuple):
        # The other batches are checked when they are fetched.
        require_no_number_lists(data[0], f"{name}: batch 0", (list,))
