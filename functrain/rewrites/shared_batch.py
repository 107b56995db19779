"""Dense layers of many members that share one batch: one product for each member.

`vmap` turns `x @ w` into one product of x with the weights of all members side by side. For it XLA
transposes all weights, and the result; the same happens to the gradient. With a copy of the batch
for each member, only the batch is transposed. That is faster if the copies are small in comparison
with the weights and results: if a layer has four times as many outputs as the batch has rows, or
few inputs. `benchmarks/upstream/shared_batch.py` reproduces it for one layer.

Microseconds of one core per member and step, N MLPs with a shared batch of B and Adam, jax 0.10, in
a loop, the minimum of several alternating runs on a busy machine:

    layers         N     B      one product -> one each
    784 64 64 10   8     32     139 -> 116
    784 64 64 10   32    32     184 -> 146
    784 64 10      128   32     210 -> 165
    784 256 10     8     32     674 -> 474
    2048 256 10    8     16     4036 -> 1057
    512 512 10     8     32     1982 -> 765
    784 128 10     16    64     529 -> 437
    256 64 10      16    32     64 -> 39
    64 128 128 10  32    32     84 -> 79
    64 64 10       512   8      15.3 -> 10.8
    8 64 1         1024  16     3.2 -> 1.6
    784 48 10      32    32     94 -> 95
    64 32 10       32    32     9.7 -> 10.0
    784 16 10      32    32     42 -> 56
    784 64 64 10   32    128    408 -> 506
    4 16 2         1024  4      1.06 -> 1.11       (hence: 8 rows and 8 inputs or more)
    64 16 2        32    2      2.2 -> 2.6
    64 2           32    1      0.15 -> 0.22

Wall-clock time on two idle cores, medians of 12 alternating runs. Here XLA distributes the one
product over threads:

    2048 256 10    8     16     2834 -> 1054
    512 512 10     8     32     1456 -> 707
    784 256 10     8     32     519 -> 446
    64 128 128 10  32    32     108 -> 107
    256 64 10      16    32     53 -> 44
    784 64 64 10   32    32     167 -> 168         (another time 188 -> 204)
    784 64 10      128   32     163 -> 182         (hence: copies of a quarter of it at most)

Activations with the batch as their last axis, through all layers, would save more for small layers:
64 32 10 written that way takes 7.8 instead of 9.7. 784 64 64 10 and 64 128 128 10 would not be
faster than with this rewrite.

The sums may be computed in another order, which changes the last bits.
"""

from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import are_wide_floats, avals
from functrain.rewrites._rewrite import Rewrite

# The least number of rows and of inputs: see the rows "4 16 2", "64 16 2" and "64 2" of the table.
MIN_SIDE = 8


def _applies(eqn: core.JaxprEqn) -> bool:
    """Returns True for a matrix times those of all members, `[N, K, H]`, over the axis K."""
    contracted, batch = eqn.params["dimension_numbers"]
    if any(batch) or not are_wide_floats(eqn):
        return False
    lhs, rhs, out = avals(eqn)
    is_lhs_shared = lhs.ndim == 2
    shared, stacked = (lhs, rhs) if is_lhs_shared else (rhs, lhs)
    stacked_contracted = contracted[1] if is_lhs_shared else contracted[0]
    if (shared.ndim, stacked.ndim, tuple(stacked_contracted)) != (2, 3, (1,)):
        return False
    # What XLA would transpose, per member, must be at least four times the copy of the batch.
    transposed = (stacked.size + out.size) // stacked.shape[0]
    is_faster: bool = 4 * shared.size <= transposed and min(shared.shape) >= MIN_SIDE
    return is_faster


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    (lhs_contracted, rhs_contracted), _ = params["dimension_numbers"]
    precision, is_lhs_shared = params["precision"], lhs.ndim == 2
    if is_lhs_shared:
        shared, stacked, (axis,) = lhs, rhs, lhs_contracted
    else:
        shared, stacked, (axis,) = rhs, lhs, rhs_contracted
        params["precision"] = precision and precision[::-1]
    rows = shared if axis == 1 else lax.transpose(shared, (1, 0))
    copies = lax.broadcast(rows, stacked.shape[:1])  # [N, B, K]
    params["dimension_numbers"] = (((2,), (1,)), ((0,), (0,)))
    out = primitives.dot_general_p.bind(copies, stacked, **params)  # [N, B, H]
    return lax.transpose(out, (1, 0, 2) if is_lhs_shared else (0, 2, 1))


shared_batch = Rewrite(
    name="shared_batch",
    primitive=primitives.dot_general_p,
    applies=_applies,
    replace=_replace,
    reason="a product for each member, with a copy of the batch, transposes no weights",
)
