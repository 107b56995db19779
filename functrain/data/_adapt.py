"""From what users pass as data to `Batches`."""

import inspect
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from functrain.data._arrays import require_no_number_lists
from functrain.data._batches import Batches
from functrain.data._iterator import IteratorBatches
from functrain.data._loader import LoaderBatches, SeekableLoader
from functrain.data._local import Local, LocalBatches


def as_batches(data: Any, name: str = "data") -> Batches:
    """Returns the batches of what `fit`, `run`, `evaluate` and `predict` take as data.

    Args:
      data: A loader that can seek, such as `ArrayLoader`; an iterable of batches; one of these in
        `functrain.distributed.local`; or `Batches`, which are returned as they are.
      name: The argument it was passed as, for errors.

    Raises:
      TypeError: `data` is none of these.
      ValueError: `data` is known to have no batches.
    """
    if isinstance(data, Batches):
        return data
    if isinstance(data, Local):
        return LocalBatches(as_batches(data.data, name), data)
    if isinstance(data, SeekableLoader):
        return LoaderBatches(data, name)
    _require_iterable(data, name)
    return IteratorBatches(data, name)


def _require_iterable(data: Any, name: str) -> None:
    """Raises TypeError for what is no iterable of batches, and for arrays that have to be cut."""
    if inspect.isgeneratorfunction(data):
        raise TypeError(
            f"{name}: expected an iterable of batches, got the generator function "
            f"{data.__name__}, which is not one until it is called: {data.__name__}(). For more "
            "than one epoch pass an object whose __iter__ it is."
        )
    is_array = isinstance(data, dict | np.ndarray | jax.Array | str | bytes)
    is_tuple_of_arrays = isinstance(data, tuple) and any(hasattr(x, "shape") for x in data)
    if is_array or is_tuple_of_arrays or not isinstance(data, Iterable):
        raise TypeError(
            f"{name}: expected an ArrayLoader or an iterable of batches, got "
            f"{type(data).__name__}. For arrays: functrain.ArrayLoader((x, y), batch_size); "
            "to predict, ArrayLoader(x, batch_size)."
        )
    if isinstance(data, list | tuple):
        if not data:
            raise ValueError(f"{name}: expected at least one batch, got an empty list")
        if isinstance(data[0], bool | int | float | complex | str):
            raise TypeError(
                f"{name}: expected a list of batches, got one of {type(data[0]).__name__}s. For "
                "numbers: functrain.ArrayLoader(np.asarray(data), batch_size)."
            )
        require_no_number_lists(data[0], f"{name}: batch 0", (list,))
