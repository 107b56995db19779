"""Stacks batches into chunks, in host memory that a CPU device can use without a copy."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common._types import PyTree
from functrain.common._wide_integers import require_integers_fit

# XLA's CPU client uses memory that is aligned to 64 bytes without copying it. NumPy's allocations
# are aligned to 16 bytes only: a chunk of 32 MiB took 15 ms to transfer, and takes 0.3 ms so.
ALIGNMENT = 64


def empty_aligned(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Allocates an array in aligned memory, in the machine's byte order.

    The memory is never reused, because `jax.device_put` aliases it on CPU even with
    ``may_alias=False`` (jax#37830), and a device may still be reading it.
    """
    # jax ignores the byte order of a dtype, and would read swapped numbers without an error.
    dtype = np.dtype(dtype).newbyteorder("=")
    # Not `np.prod`, which takes 6 µs: with K = 1 this runs for every leaf of every batch.
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    aligned: np.ndarray = raw[start : start + size].view(dtype).reshape(shape)
    return aligned


def copy_padded(x: np.ndarray, k: int) -> np.ndarray:
    """Copies an array to fresh, aligned memory of k rows, with zeros after its own."""
    out = empty_aligned((k, *x.shape[1:]), x.dtype)
    out[: len(x)], out[len(x) :] = x, 0
    return out


def take_padded(x: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    """Returns ``x[rows]`` like `copy_padded`; the rows, `i64[steps, B]`, must be valid."""
    out = empty_aligned((k, *rows.shape[1:], *x.shape[1:]), x.dtype)
    # With any other mode NumPy writes to a temporary array first, and copies that.
    x.take(rows, axis=0, out=out[: len(rows)], mode="clip")
    out[len(rows) :] = 0
    return out


def stack_batches(batches: Iterable[PyTree], k: int) -> tuple[PyTree, int]:
    """Copies batches of one signature into new arrays `[k, B, ...]`; also returns their number.

    Each batch is copied before the next one is fetched, since its source may reuse the memory.
    Arrays of jax are stacked on their device.
    """
    # For each leaf a buffer on the host, or a list of arrays on a device.
    columns: list[Any] = []
    steps = 0
    structure: Any = None
    for batch in batches:
        leaves, structure = jax.tree.flatten(batch)
        if not steps:
            for leaf in leaves:
                on_device = isinstance(leaf, jax.Array)
                columns.append([] if on_device else empty_aligned((k, *leaf.shape), leaf.dtype))
        for column, leaf in zip(columns, leaves, strict=True):
            if isinstance(column, list):
                column.append(leaf)
            else:
                column[steps] = leaf
        steps += 1
    for i, column in enumerate(columns):
        if isinstance(column, list):
            # No step uses the rows after the last batch: they need not be zeros.
            columns[i] = jnp.stack([*column, *column[-1:] * (k - steps)])
        else:
            column[steps:] = 0
    chunk = jax.tree.unflatten(structure, columns)
    require_integers_fit(chunk, "data")
    return chunk, steps


def copy_batch(batch: PyTree) -> PyTree:
    """Copies the arrays on the host, since the source of a batch may reuse their memory."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.array(x), batch)


def pad_chunk(batches: PyTree, k: int) -> PyTree:
    """Copies stacked batches to k rows, unless they have k already."""
    return jax.tree.map(lambda x: x if len(x) == k else copy_padded(x, k), batches)
