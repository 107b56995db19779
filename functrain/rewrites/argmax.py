"""Where the largest or smallest number is: the extremum first, then the first that equals it.

XLA's CPU backend carries number and index through one reduction, one by one. Two reductions of
numbers are vectorized, and the second is faster over indices in float32 than over integers.

Microseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`), float32 but for the
last, over the last axis but for those marked:

    shape            as is -> in two passes
    32 10            11/0.14 -> 10/0.32
    512 10           30/3.7 -> 25/16
    4096 2           17/3.7 -> 125/126
    512 24           29/14 -> 34/33         (so: 32 or more)
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

Of integers it gains less than twice, and now and then nothing: they are left. So is `top_k`, which
k such rounds do not reach: 32 1000, k = 5: 68/58 -> 310/142.

The index is the same: of equals the first, of NaN the first, and a NaN before all others. Only of
bfloat16 it may be another: XLA compares it unrounded where it is computed just before, and so what
is equal when rounded may go to either. That the others keep the index rests on XLA's giving both
passes the same operand; `tests/rewrites/test_argmax.py` looks whether it does.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import are_floats, avals, is_sharded
from functrain.rewrites._frame import Rewrite
from functrain.rewrites._windows import at_least_float32

LEAST = 32
MOST = 2**24  # integers that float32 tells apart


def _applies(eqn: core.JaxprEqn) -> bool:
    operand, (axis,) = avals(eqn)[0], eqn.params["axes"]
    return (
        are_floats(operand)
        and LEAST <= operand.shape[axis] <= MOST
        and not any(map(is_sharded, avals(eqn)))
    )


def _replace(x: jax.Array, *, find: str, axes: tuple[int], index_dtype: jnp.dtype) -> jax.Array:
    x, (axis,) = at_least_float32(x), axes
    extremum = getattr(jnp, find)(x, axis, keepdims=True)  # NaN where there is one
    found = (x == extremum) | jnp.isnan(x)
    index = lax.broadcasted_iota(jnp.float32, x.shape, axis)
    first = jnp.min(jnp.where(found, index, x.shape[axis] - 1), axis)
    return lax.convert_element_type(first, index_dtype)


argmax = Rewrite(
    name="argmax",
    primitive=primitives.argmax_p,
    applies=_applies,
    replace=functools.partial(_replace, find="max"),
    reason="the maximum, then its first place, are faster than both at once",
    is_exact=lambda eqn: avals(eqn)[0].dtype != jnp.bfloat16,
)
argmin = argmax._replace(
    name="argmin",
    primitive=primitives.argmin_p,
    replace=functools.partial(_replace, find="min"),
    reason="the minimum, then its first place, are faster than both at once",
)
