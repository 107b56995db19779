"""Gradients of attention's keys: the other order of the product, which turns the smaller operand.

The gradient of the scores, `[T, S]` for each head, is summed over its rows with the queries,
`[T, H]`. A kernel for products of batches wants what is summed over last on the left: so XLA turns
the scores, while it computes them. In the other order it turns the queries; and the result, after
a barrier, for else XLA would turn the product back.

Microseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`), the least of some on
a busy machine; float32, B images or texts and N heads:

    B   N   T    S    H       as is -> the other order
    16  4   64   64   16      327/353 -> 250/181
    32  4   16   16   16      150/259 -> 69/58
    8   2   32   32   16      41/31 -> 36/16
    4   8   64   64   32      227/215 -> 196/210
    8   2   128  128  64      887/672 -> 753/563
    4   3   197  197  64      1310/1236 -> 1148/1015
    2   8   512  512  64      51275/76595 -> 23201/38560

Sums may be taken in another order: last bits change.
"""

from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import are_floats, avals, is_sharded, is_sharding_free
from functrain.rewrites._frame import Rewrite

LEAST = 2**14  # numbers that XLA turns


def _applies(eqn: core.JaxprEqn) -> bool:
    """Whether the larger operand is on the left, and summed over what is not its last axis."""
    (over, _), (batch, _) = eqn.params["dimension_numbers"]
    types = avals(eqn)
    lhs, rhs, out = types
    if not batch or not over or not LEAST <= lhs.size > rhs.size:
        return False
    if not are_floats(*types) or len({aval.dtype for aval in types}) > 1 or out.dtype.itemsize < 4:
        return False
    kept = [a for a, n in enumerate(lhs.shape) if n > 1 and a not in (*over, *batch)]
    turned = bool(kept) and max(over) < max(kept)
    return turned and not any(map(is_sharded, types)) and is_sharding_free(eqn.params)


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    (over, along), (batch, batch_right) = params["dimension_numbers"]
    params |= {"dimension_numbers": ((along, over), (batch_right, batch))}
    params["precision"] = params["precision"] and params["precision"][::-1]
    out = lax.optimization_barrier(primitives.dot_general_p.bind(rhs, lhs, **params))
    first, middle = len(batch), rhs.ndim - len(along)  # its axes: the batch's, those of rhs, of lhs
    return lax.transpose(out, (*range(first), *range(middle, out.ndim), *range(first, middle)))


attention_gradient = Rewrite(
    name="attention_gradient",
    primitive=primitives.dot_general_p,
    applies=_applies,
    replace=_replace,
    reason="in the other order the smaller operand is turned",
)
