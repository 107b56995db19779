"""What the steps of a chunk reported, row by row."""

import jax

from functrain.common._types import PyTree


def first(rows: PyTree, steps: int) -> PyTree:
    """Returns the rows of the steps that were taken, where they are: leaves `[steps, ...]`."""
    return jax.tree.map(lambda x: x if len(x) == steps else x[:steps], rows)


def on_host(rows: PyTree, steps: int) -> PyTree:
    """Fetches the rows of the steps that were taken: NumPy arrays `[steps, ...]`. Waits."""
    return first(jax.device_get(rows), steps)


def row(rows: PyTree, i: int) -> PyTree:
    """Returns what the i-th step reported."""
    return jax.tree.map(lambda x: x[i], rows)
