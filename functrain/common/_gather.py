"""Fetching of arrays to the host, including arrays spread over processes."""

import pickle
from typing import Any

import jax
import numpy as np

from functrain.common._types import PyTree


def fetch_global(tree: PyTree) -> PyTree:
    """Fetches arrays as `jax.device_get` does, and waits for them.

    An array whose shards are spread over processes is gathered on each of them. That is a
    collective operation: all processes must fetch the same arrays in the same order.
    """
    if jax.process_count() > 1:
        tree = jax.tree.map(_gather_shards, tree)
    return jax.device_get(tree)


def _gather_shards(x: Any) -> Any:
    # A replicated array needs no collective: each process has a copy of it.
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    return allgather(x, tiled=True)


def allgather(x: Any, **options: Any) -> Any:
    """Returns the arrays of all processes, stacked, or with ``tiled=True`` the global array."""
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, **options)


def gather_from_processes(value: Any) -> list[Any]:
    """Returns the values that the processes passed, in their order; all processes must call it.

    The values should be small. They are pickled and travel as arrays of bytes.
    """
    if jax.process_count() == 1:
        return [value]
    payload = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = allgather(np.asarray(payload.size, np.int32))
    # Padded to a power of two: each length is a program to compile, so there should be few.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: payload.size] = payload
    rows = allgather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
