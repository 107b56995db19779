"""Batches stacked into chunks."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common._types import PyTree
from functrain.common._wide_integers import require_integers_fit
from functrain.data import _buffer


def stack_batches(batches: Iterable[PyTree], k: int) -> tuple[PyTree, int]:
    """Copies batches of one kind into fresh memory: leaves `[k, B, ...]`, and how many there are.

    Each batch is copied before the next one is fetched, since its source may use the memory
    again. Arrays of jax are stacked on their device.
    """
    rows: list[Any] = []
    steps = 0
    structure: Any = None
    for batch in batches:
        leaves, structure = jax.tree.flatten(batch)
        if not steps:
            rows = [
                [] if isinstance(x, jax.Array) else _buffer.empty((k, *x.shape), x.dtype)
                for x in leaves
            ]
        for row, leaf in zip(rows, leaves, strict=True):
            if isinstance(row, list):
                row.append(leaf)
            else:
                row[steps] = leaf
        steps += 1
    for i, row in enumerate(rows):
        if isinstance(row, list):
            rows[i] = pad_array(jnp.stack(row), k)
        else:
            row[steps:] = 0
    chunk = jax.tree.unflatten(structure, rows)
    require_integers_fit(chunk, "data")
    return chunk, steps


def pad_chunk(batches: PyTree, k: int) -> PyTree:
    """Fills stacked batches up to k with zeros, which no step uses."""
    return jax.tree.map(lambda x: pad_array(x, k), batches)


def pad_array(x: Any, k: int) -> Any:
    """Fills one array up to k with zeros, on the host in fresh, aligned memory."""
    n = len(x)
    if n == k:
        return x
    if isinstance(x, jax.Array):
        return jnp.concatenate([x, jnp.zeros((k - n, *x.shape[1:]), x.dtype)])
    out = _buffer.empty((k, *x.shape[1:]), x.dtype)
    out[:n], out[n:] = x, 0
    return out
