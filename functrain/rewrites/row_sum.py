"""Sums over the last of four or more axes, as in attention's softmax, as products with ones.

XLA's CPU backend fuses the sum in the gradient of a softmax with the operations around it,
including the mask and the product with the values. The fused kernel takes five times as long as its
parts. A product with ones is a separate kernel.

Microseconds of attention and its gradients, 2 cores, jax 0.10, alone under `jit` and in a loop
(`jit/loop`), the minimum of several runs on a busy machine; `[B, T, N, H]` as in
`dot_product_attention`:

    B  T   N H           as is -> with ones
    16 64  4 16          2495/2541 -> 1324/1439
    16 64  4 16, causal  2431/2499 -> 1879/1695
    8  32  2 16, causal  239/181 -> 158/119
    2  16  2 8, causal   40/14 -> 43/14                 (hence: 2**13 scores or more)
    4  197 3 64          9927/8595 -> 8949/7168
    16 197 3 64          86728/75976 -> 85112/53111
    8  128 2 64, causal  5254/4713 -> 4228/4006
    4  256 2 32, causal  7837/7437 -> 6074/6221
    4  512 2 32, causal  102846/68930 -> 81171/54664

    layer normalization of images [16, 32, 32, 24]  1536/1737 -> 1136/1502
    of [16, 8, 8, 96]                               211/164 -> 136/173
    a softmax alone, [64, 64, 64]                   238/182 -> 265/283     (hence: four axes)

XLA computes the sum of rows times one row, as in additive attention and in a normalization's
gradient, while it multiplies. For a product with ones, the rows must first be written to memory.
If they do not fit into the cache, that costs more than it gains. Milliseconds of processor time, a
step of Keras's layer between two dense ones, with all other rewrites, medians of 15 or 20 pairs on
a very busy machine:

    additive attention, [16, 64, 64, 128]    98/47 -> 105/54
    [8, 64, 64, 64]                          11.6/8.7 -> 11.2/9.0
    [4, 32, 32, 64]                          1.36/0.83 -> 1.27/0.81
    layer normalization, [16, 32, 32, 24]    7.3/6.7 -> 6.2/5.1
    [8, 56, 56, 96]                          81/54 -> 82/53    (hence: fewer than 2**22 numbers)

The sums are computed in another order, which changes the last bits.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import (
    are_floats,
    avals,
    find_producers,
    is_sharded,
    is_sharding_free,
)
from functrain.rewrites._rewrite import Rewrite

MIN_AXES = 4
MIN_LENGTH = 8
# The least number of elements to sum.
MIN_ELEMENTS = 2**13
# From this number of elements on, a product with one row is left to XLA.
MAX_WEIGHTED = 2**22


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


def _is_small_or_unweighted(eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> bool:
    """Returns True unless this sums many rows times one row, which XLA fuses well."""
    (result,) = eqn.outvars
    is_small = avals(eqn)[0].size < MAX_WEIGHTED
    return is_small or not any(map(_is_row, _find_factors(result, jaxpr)))


def _find_factors(total: Any, jaxpr: core.Jaxpr) -> list[Any]:
    """Returns the factors of the product that is summed, or [] if it is not a product."""
    producers = find_producers(jaxpr)
    product = producers.get(producers[total].invars[0])
    if product is None or product.primitive is not primitives.mul_p:
        return []
    return list(product.invars)


def _is_row(factor: Any) -> bool:
    shape = factor.aval.shape
    return bool(shape) and math.prod(shape) == shape[-1]


def _replace(x: jax.Array, **_: object) -> jax.Array:
    *rows, length = x.shape
    matrix = lax.reshape(x, (x.size // length, length))
    ones = jnp.ones((length, 1), x.dtype)
    # A sum is computed in full precision, whatever precision the user sets for products.
    return lax.reshape(lax.dot(matrix, ones, precision=lax.Precision.HIGHEST), rows)


row_sum = Rewrite(
    name="row_sum",
    primitive=primitives.reduce_sum_p,
    applies=_applies,
    replace=_replace,
    reason="a product with ones is not fused with the operations around the sum",
    applies_in_context=_is_small_or_unweighted,
)
