"""Sums over the last of four axes or more, those of attention's softmax, as products with ones.

XLA's CPU backend fuses the sum in the gradient of a softmax with what is before and after it, the
mask and the product with the values included, into a kernel that takes five times as long as its
parts. A product with ones is a kernel of its own.

Microseconds of attention and its gradients, 2 cores, jax 0.10, alone under `jit` and in a loop
(`jit/loop`), the least of some on a busy machine; `[B, T, N, H]` as of `dot_product_attention`:

    B  T   N H           as is -> with ones
    16 64  4 16          2495/2541 -> 1324/1439
    16 64  4 16, causal  2431/2499 -> 1879/1695
    8  32  2 16, causal  239/181 -> 158/119
    2  16  2 8, causal   40/14 -> 43/14                 (so: 2**13 scores or more)
    4  197 3 64          9927/8595 -> 8949/7168
    16 197 3 64          86728/75976 -> 85112/53111
    8  128 2 64, causal  5254/4713 -> 4228/4006
    4  256 2 32, causal  7837/7437 -> 6074/6221
    4  512 2 32, causal  102846/68930 -> 81171/54664

    layer normalization of images [16, 32, 32, 24]  1536/1737 -> 1136/1502
    of [16, 8, 8, 96]                               211/164 -> 136/173
    a softmax alone, [64, 64, 64]                   238/182 -> 265/283     (so: four axes)

Sums are taken in another order: last bits change.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import are_floats, avals, is_sharded, sharding_is_free
from functrain.rewrites._frame import Rewrite

LEAST_AXES = 4
LEAST_LENGTH = 8
LEAST = 2**13  # numbers to sum


def _applies(eqn: core.JaxprEqn) -> bool:
    operand, _ = types = avals(eqn)
    return (
        eqn.params["axes"] == (len(operand.shape) - 1,)
        and len(operand.shape) >= LEAST_AXES
        and are_floats(*types)
        and operand.dtype.itemsize >= 4
        and operand.shape[-1] >= LEAST_LENGTH
        and operand.size >= LEAST
        and not any(map(is_sharded, types))
        and sharding_is_free(eqn.params)
    )


def _replace(x: jax.Array, **_: object) -> jax.Array:
    *rows, length = x.shape
    flat = lax.reshape(x, (x.size // length, length))
    ones = jnp.ones((length, 1), x.dtype)
    return lax.reshape(lax.dot(flat, ones, precision=lax.Precision.HIGHEST), rows)


row_sum = Rewrite(
    name="row_sum",
    primitive=primitives.reduce_sum_p,
    applies=_applies,
    replace=_replace,
    reason="a product with ones is not fused with what is around the sum",
)
