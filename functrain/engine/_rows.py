"""The outputs of a chunk's steps, one row a step."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _gather, _tree
from functrain.common._log_names import name_of
from functrain.common._types import PyTree


def take_rows(rows: PyTree, steps: int) -> PyTree:
    """Returns the rows of the steps that were taken, on their devices: leaves `[steps, ...]`."""
    return jax.tree.map(lambda x: x if len(x) == steps else x[:steps], rows)


def fetch_rows(rows: PyTree, steps: int) -> PyTree:
    """Fetches the rows of the steps that were taken: NumPy arrays `[steps, ...]`. Waits."""
    return take_rows(_gather.fetch_global(rows), steps)


def row_of_step(rows: PyTree, i: int) -> PyTree:
    """Returns the outputs of the i-th step."""
    return jax.tree.map(lambda x: x[i], rows)


def scalar_logs(rows: PyTree, of_members: bool = False) -> list[tuple[int, str]]:
    """Returns the indices, among the leaves, and the names of the logs that a history can hold."""
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    return [
        (i, name_of(path))
        for i, (path, x) in enumerate(leaves)
        if is_scalar_per_step(x, of_members)
    ]


def is_scalar_per_step(rows: Any, of_members: bool = False) -> bool:
    """Returns True if the log is one real number a step (a member of a population)."""
    is_real = not (_tree.is_key(rows) or jnp.issubdtype(rows.dtype, jnp.complexfloating))
    return is_real and rows.ndim == (2 if of_members else 1)


def fetch_outputs(dispatched: Iterable[tuple[PyTree, int]]) -> list[PyTree]:
    """Returns the outputs of the steps of each chunk on the host: leaves `[steps * B, ...]`.

    Args:
      dispatched: The rows of each chunk, and the number of its steps.

    Raises:
      ValueError: An output is a scalar.
    """
    parts: list[PyTree] = []
    previous: tuple[PyTree, int] | None = None
    # The outputs of a chunk are fetched when the next one has been dispatched, so that the device
    # is busy meanwhile.
    for chunk in dispatched:
        if previous is not None:
            parts.append(jax.tree.map(_merge_batches, fetch_rows(*previous)))
        previous = chunk
    if previous is not None:
        parts.append(jax.tree.map(_merge_batches, fetch_rows(*previous)))
    return parts


def _merge_batches(x: np.ndarray) -> np.ndarray:
    """Merges the axes of steps and examples: `[steps, B, ...]` becomes `[steps * B, ...]`."""
    if x.ndim < 2:
        raise ValueError(
            "outputs: expected one per example, [B, ...], got a scalar per batch. Return what "
            "belongs to a whole batch in another way, such as by a metric."
        )
    return x.reshape(len(x) * x.shape[1], *x.shape[2:])
