"""One number of each row, such as the logit of a label, as a sum in which all others are zero.

A TPU gathers such numbers with several kernels, and adds their gradient to an array of zeros with
several more. A comparison of the label with the index of each class is fused into the kernels
around it.

Estimated cycles of a step on a TPU v5e, in a program of 32 steps, jax 0.10.1, without and with this
rewrite, beside the others for TPUs:

    MLP of 64-32-10, batch of 32         21,686 -> 16,209
    MLP of 784-64-64-10, batch of 32     26,713 -> 21,236
    transformer, 16 texts of 64 tokens   321,062 -> 318,063
    32 MLPs of 64-32-10                  34,886 -> 33,078, for the gradient alone

The number is the same; only -0.0 becomes 0.0.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, primitives

from functrain.rewrites._equations import are_floats, avals, is_sharded
from functrain.rewrites._rewrite import rewrite

# The most bytes of the array. A pass over a larger one takes longer than some kernels to start.
MAX_BYTES = 2**21


def _applies(eqn: JaxprEqn) -> bool:
    """Returns True for one index into the last axis for each row, as of `jnp.take_along_axis`."""
    operand, indices = avals(eqn)[:2]
    *rows, last = range(max(operand.ndim, 1))
    # One number of a single long row is not a label, and a sum over the row takes longer.
    # Gathers and scatters have the same fields in the same order.
    by_row = (), (last,), (last,), tuple(rows), tuple(rows)
    if not rows or tuple(eqn.params["dimension_numbers"]) != by_row:
        return False
    return (
        are_floats(operand)
        and operand.size * operand.dtype.itemsize <= MAX_BYTES
        and indices.dtype == jnp.int32
        and indices.size == math.prod(operand.shape[:-1])
        and eqn.params["mode"] != lax.GatherScatterMode.CLIP
        and not any(map(is_sharded, avals(eqn)))
    )


@rewrite(
    primitives.gather_p,
    _applies,
    "a comparison with each index is fused with the operations around it",
    platforms=("tpu",),
)
def label_pick(
    operand: jax.Array, indices: jax.Array, *, mode: Any, fill_value: Any, **_: Any
) -> jax.Array:
    """Sums each row after the numbers of all other classes are set to zero."""
    picked = jnp.sum(_keep_labels(operand, indices), axis=-1)
    # The result has axes of length one where the indices have them.
    picked = picked.reshape(indices.shape[:-1])
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        is_inside = (indices[..., 0] >= 0) & (indices[..., 0] < operand.shape[-1])
        picked = jnp.where(is_inside, picked, fill_value)
    return picked


def _scatter_add(operand: jax.Array, indices: jax.Array, updates: jax.Array, **_: Any) -> jax.Array:
    return operand + _keep_labels(_spread(updates, operand.shape), indices)


def _keep_labels(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Returns an array with zeros in place of all numbers except those of the labels."""
    classes = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where(classes == _spread(indices, x.shape), x, jnp.zeros((), x.dtype))


def _spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats the number of each row along the last axis."""
    return lax.broadcast_in_dim(x.reshape(shape[:-1]), shape, range(len(shape) - 1))


label_pick_gradient = label_pick._replace(
    name="label_pick_gradient", primitive=primitives.scatter_add_p, replace=_scatter_add
)
