"""64-bit integers, which jax truncates to 32 bits unless its 64-bit types are on."""

import functools
import mmap
from typing import Any

import jax
import numpy as np

from functrain.common._types import PyTree


def require_integers_fit(tree: PyTree, name: str) -> None:
    """Raises ValueError if jax would truncate an integer of NumPy or Python on its way to a device.

    Only 64-bit integers are read, once for the minimum and once for the maximum: 60,000 labels take
    140 µs on a busy machine.

    Args:
      tree: Any pytree; other leaves are ignored.
      name: The name of the argument, for the error.
    """
    # Types and leaves without their paths at first: of a state with hundreds of leaves, a loop over
    # them takes as long as a call of a program.
    leaves = jax.tree.leaves(tree)
    if not any(map(_is_on_host, set(map(type, leaves)))) or all(map(_fits, leaves)):
        return
    path, x = next(pair for pair in jax.tree.leaves_with_path(tree) if not _fits(pair[1]))
    x, location = np.asarray(x), jax.tree_util.keystr(path, simple=True, separator="/")
    place, limits = f" at {location}" if location else "", _limits(x)
    value = x.min() if x.min() < limits.min else x.max()
    raise ValueError(
        f"{name}: expected integers{place} that fit into {limits.dtype}, since "
        f"jax's 64-bit types are off, got {value} in {x.dtype}{list(x.shape)}. Cast or "
        'renumber them, or begin the script with jax.config.update("jax_enable_x64", True).'
    )


def is_cheap_to_read(x: np.ndarray) -> bool:
    """Returns True if an array is in memory: neither a file nor a view of overlapping windows."""
    owner: Any = x
    while isinstance(owner, np.ndarray):
        owner = owner.base
    # A memory map would be read from disk as a whole, and windows over a long series hold each of
    # its numbers many times.
    return x.flags.c_contiguous and not isinstance(owner, mmap.mmap)


@functools.cache
def _is_on_host(kind: type[Any]) -> bool:
    return issubclass(kind, np.ndarray | np.generic | int)


def _fits(x: Any) -> bool:
    x = np.asarray(x) if isinstance(x, int) else x
    is_numpy = isinstance(x, np.ndarray | np.generic)
    is_wide = is_numpy and x.dtype.kind in "iu" and x.dtype.itemsize == 8
    if not is_wide or not x.size:
        return True
    limits = _limits(x)
    return bool(limits.bits == 64 or (limits.min <= x.min() and x.max() <= limits.max))


def _limits(x: Any) -> Any:
    """Returns the `np.iinfo` of the dtype that an array of integers has in jax."""
    # jax knows no byte orders: "=" is the machine's.
    return np.iinfo(jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")))
