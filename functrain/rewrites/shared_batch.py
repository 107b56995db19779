"""Dense layers of many members that see one batch: a product for each, not one for all.

`vmap` makes of `x @ w` one product of x with the weights of all members side by side, for which
XLA turns all the weights, and turns what comes out; of the gradient it makes the same. With a copy
of the batch for each member nothing but the batch is turned. That pays where the copies are small
beside what was turned, the weights and the results: where a layer has twice as many outputs as the
batch has rows, or few inputs.

Microseconds of one core a member-step, N MLPs with a batch of B for all and Adam, jax 0.10, in a
loop, the least of some in turns on a busy machine:

    layers         N     B      one product -> one each
    784 64 64 10   8     32     168 -> 137
    784 64 64 10   32    32     191 -> 155
    784 64 10      128   32     286 -> 194
    784 256 10     8     32     897 -> 656
    2048 256 10    8     16     4357 -> 1211
    512 512 10     8     32     2067 -> 868
    784 128 10     16    64     545 -> 485
    256 64 10      16    32     69 -> 41
    64 128 128 10  32    32     112 -> 103
    64 64 10       512   8      24.8 -> 15.7
    8 64 1         1024  16     3.8 -> 2.3
    784 48 10      32    32     147 -> 139
    64 32 10       32    32     10.3 -> 10.5       (so: copies of half of it at most)
    784 16 10      32    32     50 -> 70
    784 64 64 10   32    128    457 -> 564
    4 16 2         1024  4      1.50 -> 1.48       (so: 8 rows and 8 inputs or more)
    64 16 2        32    2      2.3 -> 2.7
    64 2           32    1      0.21 -> 0.29

Activations of members with the batch as their last axis, through all layers, would spare small
layers more: 64 32 10, by hand, takes 7.7 instead of 9.7. Of 784 64 64 10 it is as fast as this, and
64 128 128 10 takes 102 instead of 95.

Sums may be taken in another order: last bits change.
"""

from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import are_floats, avals, is_sharded, sharding_is_free
from functrain.rewrites._frame import Rewrite

LEAST_SIDE = 8


def _applies(eqn: core.JaxprEqn) -> bool:
    """Whether a matrix meets those of all members, `[N, K, H]`, in their first axis, K."""
    over, batch = eqn.params["dimension_numbers"]
    types = avals(eqn)
    if any(batch) or not are_floats(*types) or len({aval.dtype for aval in types}) > 1:
        return False
    if any(map(is_sharded, types)) or not sharding_is_free(eqn.params):
        return False
    is_first = types[0].ndim == 2
    shared, each = types[:2] if is_first else types[1::-1]
    middle = over[1] if is_first else over[0]
    if (shared.ndim, each.ndim, tuple(middle)) != (2, 3, (1,)):
        return False
    turned = (each.size + types[2].size) // each.shape[0]
    pays: bool = 2 * shared.size <= turned and min(shared.shape) >= LEAST_SIDE
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
