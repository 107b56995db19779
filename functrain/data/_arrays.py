"""What is asked of data from anywhere: arrays of numbers that jax can take."""

import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree


def host_arrays(data: PyTree, name: str = "data") -> PyTree:
    """Returns a pytree with every leaf as a NumPy array.

    Raises:
      TypeError: There are lists of numbers, or a leaf is masked, or is no array of numbers that
        jax can take.
    """
    require_no_number_lists(data, name)

    def array(path: tuple[jax.tree_util.KeyEntry, ...], leaf: PyTree) -> np.ndarray:
        require_unmasked(leaf, name, lambda: f" at {_tree.path_str(path)}")
        x = np.asarray(leaf)
        if not is_takeable(x.dtype):
            raise TypeError(
                f"{name}: expected arrays of numbers, got {type(leaf).__name__} "
                f"of {x.dtype} at {_tree.path_str(path)}. {_ADVICE.get(x.dtype.kind, _CAST)}"
            )
        return x

    return jax.tree_util.tree_map_with_path(array, data)


_CAST = "Cast it first, as in x.astype(np.float32)."
_ADVICE = {
    "O": "Rows of unequal length are padded to one; anything else is cast: x.astype(np.float32).",
    "U": "Give each text numbers first, such as the ids of its tokens.",
    "S": "Give each text numbers first, such as the ids of its tokens.",
    "M": "Make dates numbers first, such as (x - x[0]) / np.timedelta64(1, 's').",
    "m": "Make times numbers first, such as x / np.timedelta64(1, 's').",
}


def require_unmasked(leaf: Any, name: str, path: Callable[[], str] = lambda: "") -> None:
    """Raises TypeError for a masked array, whose mask would be lost.

    Args:
      leaf: Any leaf of the data.
      name: Of the argument, for the error.
      path: Returns where the leaf is.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected arrays without a mask, got a masked array{path()}, in which "
            f"{int(np.sum(leaf.mask)):,} of {leaf.size:,} numbers are masked. jax has no masks: "
            "pass x.filled(0), and the mask beside it, np.ma.getmaskarray(x), for the step to use."
        )


@functools.cache
def is_takeable(dtype: np.dtype[Any]) -> bool:
    """Whether jax has arrays of such a dtype, of either byte order."""
    try:
        jnp.asarray(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def require_no_number_lists(
    data: PyTree, name: str, kinds: tuple[type[Any], ...] = (list, tuple)
) -> None:
    """Refuses lists of numbers at the first one: each number would be a leaf of its own.

    Args:
      data: Any pytree.
      name: Of the argument, for the error.
      kinds: What to take for a list.
    """

    def look(x: PyTree) -> bool:
        several = isinstance(x, kinds) and len(x) > 0
        if several and isinstance(x[0], numbers.Number | np.generic | str | bytes):
            what = "texts" if isinstance(x[0], str | bytes) else "numbers"
            raise TypeError(
                f"{name}: expected arrays, got a {type(x).__name__} of {len(x):,} {what}, "
                f"{', '.join(map(repr, x[:3]))}{', ...' * (len(x) > 3)}. Make it an array: "
                "np.asarray(x)."
            )
        return False

    jax.tree.leaves(data, is_leaf=look)
