"""What the steps of a chunk reported, row by row."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from functrain.common import _gather, _tree
from functrain.common._types import PyTree


def take_rows(rows: PyTree, steps: int) -> PyTree:
    """Returns the rows of the steps that were taken, where they are: leaves `[steps, ...]`."""
    return jax.tree.map(lambda x: x if len(x) == steps else x[:steps], rows)


def fetch_rows(rows: PyTree, steps: int) -> PyTree:
    """Fetches the rows of the steps that were taken: NumPy arrays `[steps, ...]`. Waits."""
    return take_rows(_gather.fetch_global(rows), steps)


def row_of_step(rows: PyTree, i: int) -> PyTree:
    """Returns what the i-th step reported."""
    return jax.tree.map(lambda x: x[i], rows)


def is_scalar_per_step(rows: Any, of_members: bool = False) -> bool:
    """Whether each step reported one number, of a population one a member: a key is none."""
    return rows.ndim == (2 if of_members else 1) and not _tree.is_key(rows)


def fetch_outputs(dispatched: Iterable[tuple[PyTree, int]]) -> list[PyTree]:
    """Returns the outputs of the steps of each chunk on the host: leaves `[steps * B, ...]`.

    A chunk's are fetched when the next one is dispatched: the device is busy meanwhile.

    Args:
      dispatched: Rows of each chunk, and how many steps it took.

    Raises:
      ValueError: An output is a scalar.
    """
    parts: list[PyTree] = []
    late: list[tuple[PyTree, int]] = []
    for found in dispatched:
        parts += [jax.tree.map(_join, fetch_rows(*chunk)) for chunk in late]
        late = [found]
    return parts + [jax.tree.map(_join, fetch_rows(*chunk)) for chunk in late]


def _join(x: np.ndarray) -> np.ndarray:
    if x.ndim < 2:
        raise ValueError(
            "outputs: expected one per example, [B, ...], got a scalar per batch. A step that "
            "trains returns logs: predict takes one from functrain.predict_step(model)."
        )
    return x.reshape(len(x) * x.shape[1], *x.shape[2:])
