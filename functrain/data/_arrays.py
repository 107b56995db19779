"""Converts data to arrays of numbers that jax supports."""

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree

_ARRAY_PROTOCOLS = ("__array__", "__array_interface__", "__array_struct__", "numpy")


def host_batch(batch: PyTree, label: str = "") -> PyTree:
    """Converts everything else to NumPy arrays; arrays of jax are kept.

    Args:
      batch: A pytree.
      label: Names the batch in errors, such as "batch 0 of epoch 1 of data".

    Raises:
      TypeError: A leaf is a masked array, or has a dtype that jax does not support.
    """

    def location(leaf: Any) -> str:
        path = next(path for path, x in _tree.leaves_with_path(batch) if x is leaf)
        return f" at {path} of {label}" if label else f" at {path}"

    def convert(leaf: Any) -> Any:
        return leaf if isinstance(leaf, jax.Array) else _to_numpy(leaf, lambda: location(leaf))

    return jax.tree.map(convert, batch)


def _to_numpy(leaf: Any, location: Callable[[], str]) -> np.ndarray:
    """Converts a leaf. Its location is a function, since paths are slow to make."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"data: expected arrays without a mask, got a masked array{location()}. Pass "
            "x.filled(0), and beside it the mask for the step to use, np.ma.getmaskarray(x)."
        )
    is_array = isinstance(leaf, Sequence) or any(hasattr(leaf, name) for name in _ARRAY_PROTOCOLS)
    # `np.asarray` would call `__getitem__` until an IndexError, which it need not raise.
    if hasattr(leaf, "__getitem__") and not is_array:
        raise TypeError(
            f"data: expected arrays, got {type(leaf).__name__}{location()}. Make one of it, such "
            "as np.stack([x[i] for i in range(len(x))]), or pass an iterable of batches."
        )
    # Some tensors can be converted by their method `numpy` only.
    array = np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
    if not _is_supported_dtype(array.dtype):
        raise TypeError(
            f"data: expected arrays of numbers, got {type(leaf).__name__} of {array.dtype}"
            f"{location()}. Cast it, as in x.astype(np.float32); pad rows of unequal length, and "
            "replace strings by ids."
        )
    return array


@functools.cache
def _is_supported_dtype(dtype: np.dtype[Any]) -> bool:
    """Returns True if jax has arrays of a dtype, which may have either byte order."""
    # jax has no list of its dtypes, which include those of ml_dtypes: try one.
    try:
        jnp.asarray(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def require_no_number_lists(
    data: PyTree, name: str, kinds: tuple[type[Any], ...] = (list, tuple)
) -> None:
    """Raises TypeError for the first list of numbers: each number would be a leaf.

    Args:
      data: Any pytree.
      name: Name of the argument, for the error.
      kinds: The types that count as lists.
    """

    def check(x: PyTree) -> bool:
        has_items = isinstance(x, kinds) and len(x) > 0
        if has_items and isinstance(x[0], numbers.Number | np.generic | str | bytes):
            raise TypeError(
                f"{name}: expected arrays, got a {type(x).__name__} of {len(x):,} "
                f"{type(x[0]).__name__}s. Make it an array: np.asarray(x)."
            )
        return False

    # jax calls `is_leaf` for a list before it flattens it, so long lists are not flattened at all.
    jax.tree.leaves(data, is_leaf=check)
