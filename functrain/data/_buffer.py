"""Host memory that a CPU device can take as it is."""

from collections.abc import Sequence
from typing import Any

import numpy as np

# XLA's CPU client uses memory at such an address without copying it. NumPy's own allocations are
# aligned to 16 bytes only: a chunk of 32 MiB then took 15 ms to hand over, and takes 0.3 so.
ALIGNMENT = 64


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Returns fresh, aligned memory. It is never reused: a device may be reading it.

    In the machine's byte order, whatever the dtype's: jax reads no other, and does not say so.
    """
    dtype = np.dtype(dtype).newbyteorder("=")
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    aligned: np.ndarray = raw[start : start + size].view(dtype).reshape(shape)
    return aligned


def copy(x: np.ndarray) -> np.ndarray:
    """Returns a copy in fresh, aligned memory."""
    out = empty(x.shape, x.dtype)
    np.copyto(out, x)
    return out


def take(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns ``x[rows]`` in fresh, aligned memory; the rows must be valid."""
    out = empty((*rows.shape, *x.shape[1:]), x.dtype)
    return x.take(rows, axis=0, out=out, mode="clip")  # any other mode goes through a buffer
