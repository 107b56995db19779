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

A sum of rows times one row, as in additive attention and in a normalization's gradient, XLA takes
as it multiplies; for ones the product has to be written first. Where that leaves the cache it costs
more than it gains. Milliseconds of processor time, a step of Keras's layer between two dense ones,
the rest rewritten, medians of 15 or 20 pairs on a very busy machine:

    additive attention, [16, 64, 64, 128]    98/47 -> 105/54
    [8, 64, 64, 64]                          11.6/8.7 -> 11.2/9.0
    [4, 32, 32, 64]                          1.36/0.83 -> 1.27/0.81
    layer normalization, [16, 32, 32, 24]    7.3/6.7 -> 6.2/5.1
    [8, 56, 56, 96]                          81/54 -> 82/53    (so: fewer than 2**22 such numbers)

Sums are taken in another order: last bits change.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import are_floats, avals, is_sharded, is_sharding_free
from functrain.rewrites._frame import Rewrite

MIN_AXES = 4
MIN_LENGTH = 8
MIN_ELEMENTS = 2**13  # numbers to sum
MAX_WEIGHTED = 2**22  # of those that are a product with one row


def _applies(eqn: core.JaxprEqn) -> bool:
    operand, _ = types = avals(eqn)
    return (
        eqn.params["axes"] == (len(operand.shape) - 1,)
        and len(operand.shape) >= MIN_AXES
        and are_floats(*types)
        and operand.dtype.itemsize >= 4
        and operand.shape[-1] >= MIN_LENGTH
        and operand.size >= MIN_ELEMENTS
        and not any(map(is_sharded, types))
        and is_sharding_free(eqn.params)
    )


def _is_free(eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> bool:
    """Whether it does not sum many rows times one row, which XLA does as it multiplies."""
    (result,) = eqn.outvars
    few = avals(eqn)[0].size < MAX_WEIGHTED
    return few or not any(map(_is_row, _factors(result, jaxpr)))


def _factors(total: Any, jaxpr: core.Jaxpr) -> list[Any]:
    """Returns what is multiplied before it is summed up, nothing where that is no product."""
    made: dict[Any, core.JaxprEqn] = {out: each for each in jaxpr.eqns for out in each.outvars}
    product = made.get(made[total].invars[0])
    if product is None or product.primitive is not primitives.mul_p:
        return []
    return list(product.invars)


def _is_row(factor: Any) -> bool:
    shape = factor.aval.shape
    return bool(shape) and math.prod(shape) == shape[-1]


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
    applies_in_context=_is_free,
)
