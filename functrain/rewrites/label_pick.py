"""One number of each row, such as the logit of a label, as a sum in which all others are zero.

TPUs and GPUs gather such numbers with several kernels, and add their gradient to an array of zeros
with several more. A comparison of the label with the index of each class is fused into the kernels
around it.

Estimated cycles of a step on a TPU v5e, in a program of 32 steps, jax 0.10.1:

    MLP of 64-32-10, batch of 32         25,323 -> 21,681
    MLP of 784-64-64-10, batch of 32     30,350 -> 26,708
    transformer, 16 texts of 64 tokens   388,678 -> 386,887
    convnet of 28 x 28, batch of 32      227,034 -> 223,392

The number is the same; only -0.0 becomes 0.0.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import are_floats, avals, is_sharded
from functrain.rewrites._rewrite import Rewrite

ACCELERATORS = ("gpu", "tpu")
# The most bytes of the array. A pass over a larger one takes longer than some kernels to start.
MAX_BYTES = 2**21


def _applies_to_gather(eqn: core.JaxprEqn) -> bool:
    operand, indices = avals(eqn)[:2]
    numbers = eqn.params["dimension_numbers"]
    return (
        _picks_one_of_each_row(
            operand,
            indices,
            numbers.start_index_map,
            numbers.operand_batching_dims,
            numbers.start_indices_batching_dims,
        )
        and math.prod(eqn.params["slice_sizes"]) == 1
        and numbers.collapsed_slice_dims == numbers.start_index_map
        and not any(map(is_sharded, avals(eqn)))
    )


def _picks_one_of_each_row(
    operand: Any,
    indices: Any,
    axes: tuple[int, ...],
    operand_rows: tuple[int, ...],
    index_rows: tuple[int, ...],
) -> bool:
    """Returns True if there is one index for each row, into the last axis of the operand."""
    rows = tuple(range(len(operand.shape) - 1))
    return (
        are_floats(operand)
        # One number of a single long row is not a label, and a sum over the row takes longer.
        and bool(rows)
        and operand.size * operand.dtype.itemsize <= MAX_BYTES
        # The indices of all classes must fit into the dtype of the labels.
        and operand.shape[-1] - 1 <= _largest(indices.dtype)
        and axes == (len(rows),)
        and operand_rows == index_rows == rows
        and indices.size == math.prod(operand.shape[:-1])
    )


def _largest(dtype: Any) -> int:
    # Not `np.iinfo`, which does not know int4.
    info = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]  # of ml_dtypes
    return int(info.max)


def _spread(indices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats the index of each row along the last axis."""
    rows = lax.reshape(indices, shape[:-1])
    return lax.broadcast_in_dim(rows, shape, tuple(range(len(shape) - 1)))


def _gather(operand: jax.Array, indices: jax.Array, *, mode: Any, fill_value: Any, **_: Any) -> Any:
    last = operand.shape[-1] - 1
    if mode == lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, last)
    classes = lax.broadcasted_iota(indices.dtype, operand.shape, operand.ndim - 1)
    is_chosen = classes == _spread(indices, operand.shape)
    picked = jnp.sum(jnp.where(is_chosen, operand, jnp.zeros((), operand.dtype)), axis=-1)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        is_inside = (indices >= 0) & (indices <= last)
        picked = jnp.where(is_inside.reshape(picked.shape), picked, fill_value)
    # The result has axes of length one where the indices have them.
    return picked.reshape(indices.shape[:-1])


def _applies_to_scatter(eqn: core.JaxprEqn) -> bool:
    operand, indices, updates = avals(eqn)[:3]
    numbers = eqn.params["dimension_numbers"]
    return (
        _picks_one_of_each_row(
            operand,
            indices,
            numbers.scatter_dims_to_operand_dims,
            numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims,
        )
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims
        and updates.size == math.prod(operand.shape[:-1])
        and eqn.params["mode"] != lax.GatherScatterMode.CLIP
        and not any(map(is_sharded, avals(eqn)))
    )


def _scatter(operand: jax.Array, indices: jax.Array, updates: jax.Array, **_: Any) -> jax.Array:
    index, update = (_spread(x, operand.shape) for x in (indices, updates))
    classes = lax.broadcasted_iota(index.dtype, operand.shape, operand.ndim - 1)
    return operand + jnp.where(classes == index, update, jnp.zeros((), operand.dtype))


label_pick = Rewrite(
    name="label_pick",
    primitive=primitives.gather_p,
    applies=_applies_to_gather,
    replace=_gather,
    reason="a comparison with each index is fused with the operations around it",
    platforms=ACCELERATORS,
)
label_pick_gradient = Rewrite(
    name="label_pick_gradient",
    primitive=primitives.scatter_add_p,
    applies=_applies_to_scatter,
    replace=_scatter,
    reason="a comparison with each index is fused with the operations around it",
    platforms=ACCELERATORS,
)
