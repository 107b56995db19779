"""64-bit integers, of which jax keeps the lower 32 bits unless its 64-bit types are on."""

import mmap
from typing import Any

import jax
import numpy as np

from functrain.common._types import PyTree

_ON_HOST = (np.ndarray, np.generic)


def require_integers_fit(tree: PyTree, name: str) -> None:
    """Raises ValueError if jax would change an integer of a host array on its way to a device.

    Only 64-bit integers are read, once for the least and once for the largest: 60,000 labels take
    140 µs on a busy machine.

    Args:
      tree: Any pytree; leaves that are no NumPy arrays are passed over.
      name: Of the argument, for the error.
    """
    # Without paths, which take longer than a step where a state has hundreds of leaves.
    if all(map(_fits, jax.tree.leaves(tree))):
        return
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        place = jax.tree_util.keystr(path, simple=True, separator="/")
        require_fits(x, f"{name}: expected", f" at {place}" if place else "")


def require_fits(x: Any, expected: str, place: str) -> None:
    """Raises ValueError if one array, or Python integer, does not fit; see `require_integers_fit`.

    Args:
      x: Any leaf.
      expected: How the message begins.
      place: Where the leaf is, such as " at labels".
    """
    x = np.asarray(x) if isinstance(x, int) else x
    if _fits(x):
        return
    limits = _limits(x)
    value = x.min() if x.min() < limits.min else x.max()
    raise ValueError(
        f"{expected} integers{place} that {limits.dtype} holds, since jax's 64-bit types are off, "
        f"got {value} in {x.dtype}{list(x.shape)}. Cast them to what holds them, such as "
        "x.astype(np.uint32) or np.float32; number ids anew, "
        "np.unique(x, return_inverse=True)[1]; or begin the script with "
        'jax.config.update("jax_enable_x64", True).'
    )


def is_narrowed(x: Any) -> bool:
    """Returns True if a leaf holds 64-bit integers on the host that get 32 bits on a device."""
    if not isinstance(x, _ON_HOST) or x.dtype.kind not in "iu" or x.dtype.itemsize < 8:
        return False
    return bool(_limits(x).bits < 64)


def is_cheap_to_read(x: np.ndarray) -> bool:
    """Returns True if an array lies in memory once: not on disk, and in no overlapping windows."""
    owner: Any = x
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return x.flags.c_contiguous and not isinstance(owner, mmap.mmap)


def _fits(x: Any) -> bool:
    if not is_narrowed(x) or not x.size:
        return True
    limits = _limits(x)
    return bool(limits.min <= x.min() and x.max() <= limits.max)


def _limits(x: Any) -> Any:
    """Returns the `np.iinfo` of the dtype that an array of integers gets in jax."""
    return np.iinfo(jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")))
