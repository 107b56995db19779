"""Argmax and argmin in two passes: the extremum, then the first index that equals it.

XLA's CPU backend carries number and index through one scalar reduction. Two reductions of numbers
are vectorized. The second one is faster over indices in float32 than over integers.
`benchmarks/upstream/argmax.py` reproduces it.

Microseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`), float32 except for
the last row, over the last axis unless marked:

    shape            as is -> in two passes
    32 10            11/0.14 -> 10/0.32
    512 10           30/3.7 -> 25/16
    4096 2           17/3.7 -> 125/126
    512 24           29/14 -> 34/33         (hence: 32 or more)
    512 32           96/81 -> 40/22
    32 100           23/14 -> 15/5.6
    8 1000           55/72 -> 12/4.4
    64 1000          354/812 -> 65/92
    1024 256         1190/1350 -> 213/268
    4096 256         4640/5300 -> 582/779
    16 64 2048       9460/10500 -> 1430/2050
    4096 1000        18200/22400 -> 3690/20400
    2048 64 64       57900/109000 -> 46700/86200
    4 30000          466/637 -> 120/269
    1000 64, axis 0  336/357 -> 47/67
    64 1000, bf16    516/575 -> 80/179

Integers gain less than a factor of 2, and sometimes nothing, so they are not rewritten. Neither is
`top_k`, for which k such passes are slower: 32 1000, k = 5: 68/58 -> 310/142.

The index is the same: the first of equal numbers, and the first NaN if there is one. Only for
bfloat16 it may differ: XLA compares numbers that were just computed before it rounds them, so
numbers that are equal when rounded may be ordered. For other dtypes the index is the same as long
as XLA gives both passes the same operand, which `tests/rewrites/test_argmax.py` checks.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, primitives

from functrain.rewrites._conv import at_least_float32
from functrain.rewrites._equations import are_floats, avals, is_sharded
from functrain.rewrites._rewrite import Rewrite

# Shorter axes gain nothing: see the row "512 24" of the table.
MIN_LENGTH = 32
# float32 represents all integers up to this one exactly.
MAX_LENGTH = 2**24


def _applies(eqn: JaxprEqn) -> bool:
    x, (axis,) = avals(eqn)[0], eqn.params["axes"]
    if not are_floats(x) or any(map(is_sharded, avals(eqn))):
        return False
    return bool(MIN_LENGTH <= x.shape[axis] <= MAX_LENGTH)


def _replace(x: jax.Array, *, extremum: str, axes: tuple[int], index_dtype: jnp.dtype) -> jax.Array:
    x, (axis,) = at_least_float32(x), axes
    # NaN if the axis contains one. A NaN equals nothing, so it is matched with `isnan`.
    best = getattr(jnp, extremum)(x, axis, keepdims=True)
    is_match = (x == best) | jnp.isnan(x)
    index = lax.broadcasted_iota(jnp.float32, x.shape, axis)
    first = jnp.min(jnp.where(is_match, index, x.shape[axis] - 1), axis)
    return lax.convert_element_type(first, index_dtype)


argmax = Rewrite(
    name="argmax",
    primitive=primitives.argmax_p,
    applies=_applies,
    replace=functools.partial(_replace, extremum="max"),
    reason="the extremum, then its first index, are faster than both at once",
    is_exact=lambda eqn: avals(eqn)[0].dtype != jnp.bfloat16,
)
argmin = argmax._replace(
    name="argmin",
    primitive=primitives.argmin_p,
    replace=functools.partial(_replace, extremum="min"),
)
