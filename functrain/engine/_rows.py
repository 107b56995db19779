"""What the steps of a chunk reported, row by row."""

from typing import Any

import jax
import numpy as np

from functrain.common import _tree
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


def is_number(rows: Any) -> bool:
    """Whether each step reported one number: a key is none."""
    return rows.ndim == 1 and not _tree.is_key(rows)


def scalars(rows: PyTree) -> dict[str, np.ndarray]:
    """Returns the numbers among rows on the host, `[steps]` each, under their paths."""
    return {path: x for path, x in _tree.leaves_with_path(rows) if is_number(x)}
