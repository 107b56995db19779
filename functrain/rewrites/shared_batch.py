"""Dense layers of many members that see one batch: a product for each, not one for all.

`vmap` makes of `x @ w` one product of x with the weights of all members side by side, for which
XLA turns all the weights, and turns what comes out; of the gradient it makes the same. With a copy
of the batch for each member nothing but the batch is turned. That pays where the copies are small
beside what was turned, the weights and the results: where a layer has four times as many
outputs as the batch has rows, or few inputs.

Microseconds of one core a member-step, N MLPs with a batch of B for all and Adam, jax 0.10, in a
loop, the least of some in turns on a busy machine:

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
    4 16 2         1024  4      1.06 -> 1.11       (so: 8 rows and 8 inputs or more)
    64 16 2        32    2      2.2 -> 2.6
    64 2           32    1      0.15 -> 0.22

By the clock on two quiet cores, medians of 12 in turns, where the one product is shared out among
threads:

    2048 256 10    8     16     2834 -> 1054
    512 512 10     8     32     1456 -> 707
    784 256 10     8     32     519 -> 446
    64 128 128 10  32    32     108 -> 107
    256 64 10      16    32     53 -> 44
    784 64 64 10   32    32     167 -> 168         (another time 188 -> 204)
    784 64 10      128   32     163 -> 182         (so: copies of a quarter of it at most)

Activations with the batch as their last axis, through all layers, spare small layers more: 64 32 10
by hand takes 7.8 instead of 9.7. 784 64 64 10 and 64 128 128 10 are no faster so than with this.

Sums may be taken in another order: last bits change.
"""

from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import are_floats, avals, is_sharded, is_sharding_free
from functrain.rewrites._frame import Rewrite

MIN_SIDE = 8


def _applies(eqn: core.JaxprEqn) -> bool:
    """Whether a matrix meets those of all members, `[N, K, H]`, in their first axis, K."""
    over, batch = eqn.params["dimension_numbers"]
    types = avals(eqn)
    if any(batch) or not are_floats(*types) or len({aval.dtype for aval in types}) > 1:
        return False
    if any(map(is_sharded, types)) or not is_sharding_free(eqn.params):
        return False
    is_first = types[0].ndim == 2
    shared, each = types[:2] if is_first else types[1::-1]
    middle = over[1] if is_first else over[0]
    if (shared.ndim, each.ndim, tuple(middle)) != (2, 3, (1,)):
        return False
    turned = (each.size + types[2].size) // each.shape[0]
    pays: bool = 4 * shared.size <= turned and min(shared.shape) >= MIN_SIDE
    return pays and shared.dtype.itemsize >= 4


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    (over, along), _ = params["dimension_numbers"]
    precision, is_first = params["precision"], lhs.ndim == 2
    if is_first:
        shared, each, (axis,) = lhs, rhs, over
    else:
        shared, each, (axis,) = rhs, lhs, along
        params["precision"] = precision and precision[::-1]
    rows = shared if axis == 1 else lax.transpose(shared, (1, 0))
    copies = lax.broadcast(rows, each.shape[:1])
    params["dimension_numbers"] = (((2,), (1,)), ((0,), (0,)))
    out = primitives.dot_general_p.bind(copies, each, **params)
    return lax.transpose(out, (1, 0, 2) if is_first else (0, 2, 1))


shared_batch = Rewrite(
    name="shared_batch",
    primitive=primitives.dot_general_p,
    applies=_applies,
    replace=_replace,
    reason="a product for each member, with a copy of the batch, turns none of the weights",
)
