"""Batches alike, stacked: what every pass over data hands out."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from functrain.common._types import PyTree
from functrain.data import _buffer

Spec = Any
"""What tells batches apart that cannot be stacked; compared with ``==``."""


class Stack(NamedTuple):
    """Batches alike.

    Attributes:
      batches: Every leaf `[k, B, ...]`, filled up with zeros behind the first `steps`.
      steps: How many batches there are.
      examples: In each of them, B.
      marks: What else the source says of each, if it does.
    """

    batches: PyTree
    steps: int
    examples: int
    marks: Any = None


def filled(batches: PyTree, k: int, steps: int) -> PyTree:
    """Fills stacked batches up to K with zeros, which no step will see."""
    if steps == k:
        return batches
    return jax.tree.map(lambda x: fill(x, k), batches)


def fill(x: Any, k: int) -> Any:
    """Fills one array up to K with zeros, on the host in fresh, aligned memory."""
    n = len(x)
    if n == k:
        return x
    if isinstance(x, jax.Array):
        return jnp.concatenate([x, jnp.zeros((k - n, *x.shape[1:]), x.dtype)])
    out = _buffer.empty((k, *x.shape[1:]), x.dtype)
    out[:n], out[n:] = x, 0
    return out
