"""Gradients of attention's keys with swapped operands, so that the smaller one is transposed.

The gradient of the scores, `[T, S]` per head, is contracted over its rows with the queries,
`[T, H]`. XLA's kernel for batched products needs the contracted axis last on the left side, so it
transposes the scores while it computes them. With swapped operands it transposes the queries, which
are smaller. Without a barrier XLA would swap the product back; the result is transposed after it.
`benchmarks/upstream/attention_gradient.py` reproduces it.

Microseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`), the minimum of
several runs on a busy machine; float32, B images or texts and N heads:

    B   N   T    S    H       as is -> the other order
    16  4   64   64   16      327/353 -> 250/181
    32  4   16   16   16      150/259 -> 69/58
    8   2   32   32   16      41/31 -> 36/16
    4   8   64   64   32      227/215 -> 196/210
    8   2   128  128  64      887/672 -> 753/563
    4   3   197  197  64      1310/1236 -> 1148/1015
    2   8   512  512  64      51275/76595 -> 23201/38560

The sums may be computed in another order, which changes the last bits.
"""

from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import are_wide_floats, avals
from functrain.rewrites._rewrite import Rewrite

# The least number of elements that XLA would transpose.
MIN_ELEMENTS = 2**14


def _applies(eqn: core.JaxprEqn) -> bool:
    """Returns True if the larger operand is on the left and XLA would have to transpose it."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    lhs, rhs, _ = avals(eqn)
    if not batch or not contracted or not are_wide_floats(eqn):
        return False
    if not MIN_ELEMENTS <= lhs.size > rhs.size:
        return False
    # Axes of size 1 do not matter: no data moves when they are transposed.
    uncontracted = [
        axis
        for axis, size in enumerate(lhs.shape)
        if size > 1 and axis not in (*contracted, *batch)
    ]
    return bool(uncontracted) and max(contracted) < max(uncontracted)


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    params |= {"dimension_numbers": ((rhs_contracted, lhs_contracted), (rhs_batch, lhs_batch))}
    params["precision"] = params["precision"] and params["precision"][::-1]
    out = lax.optimization_barrier(primitives.dot_general_p.bind(rhs, lhs, **params))
    # The axes of `out` are those of the batch, then the rest of rhs, then the rest of lhs.
    rhs_start, lhs_start = len(lhs_batch), rhs.ndim - len(rhs_contracted)
    batch_axes, rhs_axes = range(rhs_start), range(rhs_start, lhs_start)
    return lax.transpose(out, (*batch_axes, *range(lhs_start, out.ndim), *rhs_axes))


attention_gradient = Rewrite(
    name="attention_gradient",
    primitive=primitives.dot_general_p,
    applies=_applies,
    replace=_replace,
    reason="with swapped operands, XLA transposes the smaller one",
)
