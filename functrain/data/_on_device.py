"""Data that lie on a device as a whole, of which a program takes the examples of a chunk."""

import math
from typing import Any

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.data._stack import copy_padded
from functrain.rewrites._compile import jit_without_arithmetic


class OnDevice:
    """Arrays on the default device.

    Args:
      data: Pytree of arrays, every leaf `[N, ...]`.

    Attributes:
      data: The arrays on the device, in the byte order of the machine.
    """

    def __init__(self, data: PyTree) -> None:
        self.data = jax.device_put(jax.tree.map(_to_native_order, data))

    def take(self, rows: np.ndarray, k: int) -> PyTree:
        """Returns the examples of several batches, stacked: leaves `[k, B, ...]`.

        Args:
          rows: The examples of each batch, `i64[steps, B]`.
          k: At least the number of steps. What is in the rows after them has no effect.
        """
        # All leaves together, so that the gather is one program. i32 indices reach 2**31 examples.
        indices = copy_padded(rows.astype(np.int32), k)
        return _gather(self.data, _tree.put_if_guarded(indices))


def has_room(shapes: PyTree, room: int, name: str) -> bool:
    """Returns True if data take at most `room` bytes; warns otherwise.

    Args:
      shapes: The data, or their shapes and dtypes.
      room: Bytes.
      name: The argument that the data were passed as, for the warning.
    """
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    if size <= room:
        return True
    warn(
        f"{name}: the arrays take {size / 2**30:.2g} GiB, and the device has room for "
        f"{max(0, room) / 2**30:.2g} of data, so they stay on the host and are copied in chunks."
    )
    return False


def _to_native_order(x: Any) -> Any:
    return x if isinstance(x, jax.Array) else x.astype(x.dtype.newbyteorder("="), copy=False)


@jit_without_arithmetic
def _gather(data: PyTree, rows: jax.Array) -> PyTree:
    return jax.tree.map(lambda x: x[rows], data)
