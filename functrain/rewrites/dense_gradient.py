"""Gradients of the weights of dense layers as wide products that are transposed afterwards.

JAX writes the gradient of `x @ w` as `(g^T x)^T`, contracted over the batch, or over batch and
time. XLA folds the last transpose into the product, and must then transpose one of the long
operands instead; for that it computes the operand again, with the residual branches it was summed
from. With a barrier after the product, only the small result is transposed. And of `x^T g` and
`g^T x`, the one with fewer rows than columns is faster: six times if one side is narrow, as in the
last layer. `benchmarks/upstream/dense_gradient.py` reproduces it.

Microseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`), the minimum of
several runs on a busy machine; the gradient of a layer from I to O features, float32:

    rows     I    O         as is -> the wide product
    16 64    64   256       1405/1758 -> 499/604
    16 64    256  64        951/1145 -> 559/643
    16 64    64   64        463/401 -> 247/246
    16 64    64   4 16      178/220 -> 185/263
    16 64    64   1000      6175/6626 -> 1928/2477
    16 197   192  192       3687/6810 -> 1743/4000
    8 128    768  768       17673/24215 -> 14513/15352
    8 32     32   32        32/24 -> 26/18
    2 16     32   32        19/4 -> 19/4                (hence: 128 rows or more)
    4096     128  2         665/646 -> 158/72
    4096     128  10        400/504 -> 169/136
    4096     128  32        780/791 -> 540/533
    4096     128  128       2542/2189 -> 1976/2256      (hence: rows in two axes, or a narrow side)
    512      512  512       3328/3218 -> 3241/3240
    512      128  10        100/97 -> 35/25
    1000     20   1         19/10 -> 19/10

The sums may be computed in another order, which changes the last bits.
"""

import math
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, primitives

from functrain.rewrites._equations import are_wide_floats, avals
from functrain.rewrites._rewrite import rewrite

# The limits come from the rows of the table with "hence" and "2 16".
MIN_ROWS = 128
MIN_PRODUCTS = 2**16
# The most features of the narrower side, if the rows are a single axis.
MAX_NARROW_SIDE = 32


def _applies(eqn: JaxprEqn) -> bool:
    """Returns True if both operands are contracted over all their leading axes, as x and g are."""
    (lhs_contracted, rhs_contracted), (batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs, out = avals(eqn)
    leading = tuple(range(len(lhs_contracted)))
    if batch or tuple(lhs_contracted) != leading or tuple(rhs_contracted) != leading:
        return False
    if not are_wide_floats(eqn):
        return False
    rows = math.prod(lhs.shape[: len(leading)])
    narrow_side = min(lhs.size, rhs.size) // rows
    is_faster: bool = narrow_side > 1 and (len(leading) > 1 or narrow_side <= MAX_NARROW_SIDE)
    products: int = rows * out.size
    return is_faster and rows >= MIN_ROWS and products >= MIN_PRODUCTS


@rewrite(
    primitives.dot_general_p,
    _applies,
    "a wide product, transposed afterwards, needs no copies of x or g",
)
def dense_gradient(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Multiplies in the order whose result is wide; transposes it if operands were exchanged."""
    (contracted, _), _ = params["dimension_numbers"]
    precision = params["precision"]
    shape = (*lhs.shape[len(contracted) :], *rhs.shape[len(contracted) :])
    params |= {"dimension_numbers": (((0,), (0,)), ((), ()))}
    a, b = _as_matrix(lhs, len(contracted)), _as_matrix(rhs, len(contracted))
    is_wide = a.shape[1] < b.shape[1]
    if not is_wide:
        a, b, params["precision"] = b, a, precision and precision[::-1]
    # Without the barrier XLA would fold the transpose into the product again.
    out = lax.optimization_barrier(primitives.dot_general_p.bind(a, b, **params))
    return lax.reshape(out if is_wide else lax.transpose(out, (1, 0)), shape)


def _as_matrix(x: jax.Array, row_axes: int) -> jax.Array:
    """Reshapes `[*rows, *columns]` to a matrix."""
    rows = math.prod(x.shape[:row_axes])
    return lax.reshape(x, (rows, x.size // rows))
