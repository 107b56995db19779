"""The shard of an array, concrete or abstract, on one device."""

import math
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._types import PyTree


def sharding_of(leaf: Any) -> Any:
    """Returns the sharding of a leaf that is on several devices, otherwise None."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if sharding is not None and sharding.num_devices > 1 else None


def shard_shape(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of the shard of an array that each of its devices holds."""
    sharding = sharding_of(leaf)
    return tuple(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))


def bytes_on_each(tree: PyTree) -> int:
    """Returns the bytes that the arrays of a tree take on each of their devices."""
    arrays = filter(_tree.is_array, jax.tree.leaves(tree))
    return sum(math.prod(shard_shape(x)) * x.dtype.itemsize for x in arrays)
