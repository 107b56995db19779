"""Gradients of maximum pooling by comparing numbers in place.

XLA's CPU backend walks through the windows one by one (`select_and_scatter_add`). Here the winner
of each window is found on strided slices, and each number asks whether it won.

Milliseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`); image `[N, H, H, C]`,
window k x k, stride s:

    N H C k s       as is -> compared in place
    32 26 32 2 2    5.0/7.2 -> 0.14/0.54
    32 10 64 2 2    1.4/2.7 -> 0.05/0.16
    4 8 8 2 2       0.03/0.02 -> 0.04/0.01
    8 58 64 3 2     117/115 -> 16/16
    16 17 64 3 2    5.7/3.2 -> 0.70/0.71
    16 16 64 3 1    21/37 -> 1.5/1.8
    2 8 4 3 2       0.01/0.01 -> 0.01/0.01

Where windows overlap, it stands in a branch of its own: fused with the gradient of a ReLU and a
normalization, the kernel is not vectorized any more. Milliseconds of all three, 2 cores, beside
other work:

    N H C k s       as is -> fused -> in a branch
    16 16 64 3 1    8.0/7.5 -> 13/13 -> 1.8/1.4
    8 32 64 3 2     6.1/5.5 -> 2.1/1.5 -> 2.3/1.6
    8 58 64 3 2     38/24 -> 11/8.7 -> 8.7/10
    16 17 64 3 2    3.7/3.4 -> 1.4/1.0 -> 1.4/1.0
    2 8 4 3 2       0.13/0.05 -> 0.19/0.05 -> 0.12/0.03

Ties go where they went, to the first, and a NaN wins over what is before it and loses to what is
after it. Where windows do not overlap, and nothing is summed, it keeps every bit
by itself; but the compiler fuses it with its neighbours, and those may round otherwise then.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import are_floats, avals, is_sharded
from functrain.rewrites._frame import Rewrite
from functrain.rewrites._windows import at_least_float32, call_unfused, dilated_size

# Each is a slice in the program: 3 x 3 x 3 still compiles in a second.
MAX_TAPS = 27


def _applies(eqn: core.JaxprEqn) -> bool:
    params = eqn.params
    return (
        params["select_prim"] is primitives.ge_p
        and are_floats(*avals(eqn))
        and not any(map(is_sharded, avals(eqn)))
        and all(
            min(ends) >= 0 and max(ends) < taps
            for ends, taps in zip(params["padding"], params["window_dimensions"], strict=True)
        )
        and 1 < math.prod(params["window_dimensions"]) <= MAX_TAPS
    )


def _replace(source: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    apart = params["window_dimensions"] == params["window_strides"]
    return (_apart if apart else _overlap)(source, operand, **params)


def _apart(source: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    """Every number belongs to one window at most: `[..., P, w, ...]` for each axis."""
    window, padding = params["window_dimensions"], params["padding"]
    winner = _winner(source.shape, operand, window, window, padding)
    tiles = [size for pair in zip(source.shape, window, strict=True) for size in pair]
    kept = tuple(range(0, 2 * source.ndim, 2))

    def tiled(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, tiles, kept)

    number = jnp.zeros((), jnp.int32)
    for axis, taps in enumerate(window):
        number = number * taps + lax.broadcasted_iota(jnp.int32, tiles, 2 * axis + 1)
    # A sum that starts from 0 makes a 0 of -0.
    won = (tiled(winner) == number) & tiled(source != 0)
    out = jnp.where(won, tiled(source), jnp.zeros((), source.dtype))
    sizes = [p * w for p, w in zip(source.shape, window, strict=True)]
    around = [
        (-low, low + size - total, 0)
        for (low, _), size, total in zip(padding, operand.shape, sizes, strict=True)
    ]
    return lax.pad(out.reshape(sizes), jnp.zeros((), out.dtype), around)


def _overlap(source: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    """Adds up, tap by tap, what the windows give that were won there; the first window first."""
    return call_unfused(functools.partial(_added, **params), source, operand)


def _added(source: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    window, strides, padding = (
        params[name] for name in ("window_dimensions", "window_strides", "padding")
    )
    winner = _winner(source.shape, operand, window, strides, padding)
    total = jnp.zeros(operand.shape, at_least_float32(operand).dtype)
    taps = list(enumerate(itertools.product(*map(range, window))))
    for number, tap in reversed(taps):
        won = at_least_float32(jnp.where(winner == number, source, jnp.zeros((), source.dtype)))
        around = [
            (t - low, size + low - t - dilated_size(places, stride), stride - 1)
            for t, (low, _), size, places, stride in zip(
                tap, padding, operand.shape, source.shape, strides, strict=True
            )
        ]
        total += lax.pad(won, jnp.zeros((), won.dtype), around)
    return lax.convert_element_type(total, operand.dtype)


def _winner(
    places: Sequence[int],
    operand: jax.Array,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> jax.Array:
    """Returns the number of the tap that wins each window, `i32[*places]`.

    The holder keeps it as long as it is >= the next number; padding takes part, as -inf.
    """
    x = lax.pad(operand, jnp.array(-jnp.inf, operand.dtype), [(*ends, 0) for ends in padding])
    best, winner = x, jnp.zeros(places, jnp.int32)
    for number, tap in enumerate(itertools.product(*map(range, window))):
        limits = [t + dilated_size(p, s) for t, p, s in zip(tap, places, strides, strict=True)]
        value = lax.slice(x, tap, limits, strides)
        if number == 0:
            best = value
            continue
        kept = best >= value
        best = jnp.where(kept, best, value)
        winner = jnp.where(kept, winner, number)
    return winner


max_pool_gradient = Rewrite(
    name="max_pool_gradient",
    primitive=primitives.select_and_scatter_add_p,
    applies=_applies,
    replace=_replace,
    reason="comparing in place beats a walk through the windows",
)
