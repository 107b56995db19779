"""Converts data to arrays of numbers that jax supports."""

import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree


def host_arrays(data: PyTree) -> PyTree:
    """Converts every leaf of a pytree to a NumPy array.

    Raises:
      TypeError: There is a list of numbers, or a leaf is a masked array, or has a dtype that jax
        does not support.
    """
    require_no_number_lists(data, "data")

    def array(path: tuple[jax.tree_util.KeyEntry, ...], leaf: PyTree) -> np.ndarray:
        require_unmasked(leaf, "data", lambda: f" at {_tree.path_str(path)}")
        _require_array_like(leaf, lambda: f" at {_tree.path_str(path)}")
        if _tree.is_key(leaf):
            raise TypeError(
                f"data: expected arrays of numbers, got typed keys at {_tree.path_str(path)}. Pass "
                "jax.random.key_data(keys), and call jax.random.wrap_key_data in the step."
            )
        x = np.asarray(leaf)
        if not is_supported_dtype(x.dtype):
            raise TypeError(
                f"data: expected arrays of numbers, got {type(leaf).__name__} "
                f"of {x.dtype} at {_tree.path_str(path)}. {dtype_advice(x.dtype)}"
            )
        return x

    return jax.tree_util.tree_map_with_path(array, data)


def host_batch(batch: PyTree, label: str) -> PyTree:
    """Converts tensors of other libraries to NumPy arrays; arrays of jax are kept.

    Args:
      batch: A pytree.
      label: Names the batch in errors, such as "batch 0 of epoch 1 of data".
    """
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.Array) else _to_numpy(x, batch, label), batch
    )


def _to_numpy(leaf: Any, batch: PyTree, label: str) -> np.ndarray:
    # Called only for errors, since paths are slow to make.
    def path() -> str:
        return next(path for path, x in _tree.leaves_with_path(batch) if x is leaf)

    require_unmasked(leaf, "data", lambda: f" at {path()} of {label}")
    _require_array_like(leaf, lambda: f" at {path()} of {label}")
    # Some tensors can be converted by their method `numpy` only.
    array = np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
    if not is_supported_dtype(array.dtype):
        raise TypeError(
            f"data: expected batches of numbers, got {type(leaf).__name__} of {array.dtype} at "
            f"{path()} of {label}. {dtype_advice(array.dtype)}"
        )
    return array


def _require_array_like(leaf: Any, path: Callable[[], str]) -> None:
    """Raises TypeError for a dataset that is read item by item.

    `np.asarray` would call its `__getitem__` until that raises an IndexError, which it need not do.
    """
    is_array = isinstance(leaf, Sequence) or any(hasattr(leaf, name) for name in _ARRAY_PROTOCOLS)
    if is_array or not hasattr(leaf, "__getitem__"):
        return
    advice = (
        "Make arrays of it first, with np.stack([dataset[i] for i in range(len(dataset))]), or "
        "pass an iterable of batches to fit, such as a DataLoader of grain or torch."
    )
    if hasattr(leaf, "toarray"):
        advice = "Make it dense: x.toarray()."
    elif isinstance(leaf, Mapping):
        advice = "jax takes it for one leaf: make it a dict, dict(x)."
    raise TypeError(f"data: expected arrays, got {type(leaf).__name__}{path()}. {advice}")


_ARRAY_PROTOCOLS = ("__array__", "__array_interface__", "__array_struct__", "numpy")

_CAST = "Cast it first, as in x.astype(np.float32)."
# Advice by the kind of a NumPy dtype: objects, strings, bytes, dates and times.
_ADVICE = {
    "O": "Pad rows of unequal length to one length; cast anything else: x.astype(np.float32).",
    "U": "Convert strings to numbers first, such as the ids of their tokens.",
    "S": "Convert strings to numbers first, such as the ids of their tokens.",
    "M": "Convert dates to numbers first, such as (x - x[0]) / np.timedelta64(1, 's').",
    "m": "Convert times to numbers first, such as x / np.timedelta64(1, 's').",
}


def dtype_advice(dtype: np.dtype[Any]) -> str:
    """Returns how to convert an array of a dtype that jax does not support."""
    return _ADVICE.get(dtype.kind, _CAST)


def require_unmasked(leaf: Any, name: str, path: Callable[[], str] = lambda: "") -> None:
    """Raises TypeError for a masked array, whose mask would be lost.

    Args:
      leaf: Any leaf of the data.
      name: Name of the argument, for the error.
      path: Returns a text with the path of the leaf. Called only for the error, since paths are
        slow to make.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected arrays without a mask, got a masked array{path()}, in which "
            f"{int(np.sum(leaf.mask)):,} of {leaf.size:,} numbers are masked. jax has no masks: "
            "pass x.filled(0), and the mask beside it, np.ma.getmaskarray(x), for the step to use."
        )


@functools.cache
def is_supported_dtype(dtype: np.dtype[Any]) -> bool:
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
            items = "strings" if isinstance(x[0], str | bytes) else "numbers"
            raise TypeError(
                f"{name}: expected arrays, got a {type(x).__name__} of {len(x):,} {items}, "
                f"{', '.join(map(repr, x[:3]))}{', ...' * (len(x) > 3)}. Make it an array: "
                "np.asarray(x)."
            )
        return False

    # jax calls `is_leaf` for a list before it flattens it, so long lists are not flattened at all.
    jax.tree.leaves(data, is_leaf=check)
