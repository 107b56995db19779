"""Loops that keep scalars in the rows of one array, for GPUs.

A GPU computes each scalar of a step in a kernel of its own: the optimizer's count of steps, the
sums of each metric, every log. As a row of one array, one kernel writes all of them. Kernels of a
step, as XLA's compiler for an H100 makes it (jax 0.10.1, loops of 32 steps; nothing was measured):

    workload        scalars on their own -> in rows
    mnist-mlp       29.1 -> 26.2
    mnist-convnet   39.5 -> 37.6
    transformer     168.6 -> 166.7
    lstm            938.2 -> 936.2
    digits-mlp      20.1 -> 18.2

The optimizer's updates now share an operand that is no scalar, which lets XLA join those of equal
shape. On a TPU the slices cost more than they save: 18,012 -> 25,678 cycles for digits-mlp (v5e).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from functrain.common._types import PyTree


def scan_with_scalar_rows(
    body: Callable[..., Any],
    carry: PyTree,
    stacked: PyTree,
    outputs: PyTree,
    k: int,
    unroll: int = 1,
) -> tuple[PyTree, PyTree]:
    """Computes ``lax.scan(body, carry, stacked)`` with scalars in the rows of one array.

    Row i holds the scalars of the carry after step i and the scalar outputs of that step; the last
    row, of index -1, holds the scalars before the first step. Scalars of other widths than 32 bits
    remain on their own.

    Args:
      body: ``body(carry, x) -> (carry, y)``.
      carry: The first carry.
      stacked: Every leaf `[K, ...]`.
      outputs: The types of y.
      k: K.
      unroll: Passed to `lax.scan`.
    """
    carry_leaves, output_leaves = _Split(jax.tree.map(jax.typeof, carry)), _Split(outputs)
    scalars, arrays = carry_leaves.split(carry)
    before_first = [*scalars, *[jnp.int32(0)] * output_leaves.count]
    if len(before_first) < 2:
        result: tuple[PyTree, PyTree] = lax.scan(body, carry, stacked, length=k, unroll=unroll)
        return result
    zeros = jnp.zeros((k, len(before_first)), jnp.int32)
    rows = jnp.concatenate([zeros, jnp.stack(before_first)[None]])

    def step(loop_state: Any, x: Any) -> Any:
        i, rows, arrays = loop_state
        row = lax.dynamic_index_in_dim(rows, i - 1, keepdims=False)
        carry, y = body(carry_leaves.join(row[: carry_leaves.count], arrays), x)
        scalars, arrays = carry_leaves.split(carry)
        scalar_logs, array_logs = output_leaves.split(y)
        row = jnp.stack([*scalars, *scalar_logs])
        rows = lax.dynamic_update_index_in_dim(rows, row, i, 0)
        return (i + 1, rows, arrays), array_logs

    first = jnp.int32(0), rows, arrays
    (_, rows, arrays), array_logs = lax.scan(step, first, stacked, length=k, unroll=unroll)
    last = carry_leaves.join(rows[k - 1, : carry_leaves.count], arrays)
    return last, output_leaves.join(rows[:k, carry_leaves.count :].T, array_logs)


class _Split:
    """Splits a tree into its 32-bit scalars, as integers of the same bits, and its other leaves."""

    def __init__(self, types: PyTree) -> None:
        leaves, self._structure = jax.tree.flatten(types)
        self._dtypes = [x.dtype if _is_row_scalar(x) else None for x in leaves]
        self.count = len([dtype for dtype in self._dtypes if dtype is not None])

    def split(self, tree: PyTree) -> tuple[list[jax.Array], list[Any]]:
        """Returns the scalars, each `i32[]`, and the other leaves."""
        scalars: list[jax.Array] = []
        arrays: list[Any] = []
        for x, dtype in zip(jax.tree.leaves(tree), self._dtypes, strict=True):
            if dtype is None:
                arrays.append(x)
            else:
                scalars.append(lax.bitcast_convert_type(x, jnp.int32))
        return scalars, arrays

    def join(self, scalars: jax.Array, arrays: Sequence[Any]) -> PyTree:
        """Returns the tree of `[count]` scalars, or of `[count, K]`, and the other leaves."""
        next_scalars, next_arrays = iter(scalars), iter(arrays)
        leaves = []
        for dtype in self._dtypes:
            if dtype is None:
                leaves.append(next(next_arrays))
            else:
                leaves.append(lax.bitcast_convert_type(next(next_scalars), dtype))
        return jax.tree.unflatten(self._structure, leaves)


def _is_row_scalar(aval: Any) -> bool:
    # A weak type would get lost, and the row of an explicit mesh would need a sharding.
    return (
        aval.shape == ()
        and aval.dtype in (jnp.float32, jnp.int32, jnp.uint32)
        and not aval.weak_type
        and aval.sharding.mesh.empty
    )
