"""Gradients of maximum pooling by comparing numbers in place.

XLA's CPU backend visits the windows one by one (`select_and_scatter_add`). This rewrite computes
the winning tap of each window from strided slices, and then compares each tap with the winner.
`benchmarks/upstream/max_pool_gradient.py` reproduces it.

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

If windows overlap, the computation is in a separate branch: fused with the gradient of a ReLU and a
normalization, the kernel would not be vectorized. Milliseconds of all three, 2 cores, on a busy
machine:

    N H C k s       as is -> fused -> in a branch
    16 16 64 3 1    8.0/7.5 -> 13/13 -> 1.8/1.4
    8 32 64 3 2     6.1/5.5 -> 2.1/1.5 -> 2.3/1.6
    8 58 64 3 2     38/24 -> 11/8.7 -> 8.7/10
    16 17 64 3 2    3.7/3.4 -> 1.4/1.0 -> 1.4/1.0
    2 8 4 3 2       0.13/0.05 -> 0.19/0.05 -> 0.12/0.03

Ties go to the first number, as in XLA. A NaN wins over the numbers before it and loses to those
after it, and its own gradient is NaN. If windows do not overlap, nothing is summed and the rewrite
alone keeps every bit. But XLA fuses it with the operations around it, which may then round
differently.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import at_least_float32, dilated_size, zeros_for_sum
from functrain.rewrites._equations import are_floats, avals, is_sharded
from functrain.rewrites._rewrite import Rewrite

# Each tap of a pooling window is a slice in the program: 3 x 3 x 3 still compiles in a second.
MAX_TAPS = 27


def _applies(eqn: core.JaxprEqn) -> bool:
    params = eqn.params
    return (
        params["select_prim"] is primitives.ge_p
        and are_floats(*avals(eqn))
        and not any(map(is_sharded, avals(eqn)))
        and does_every_window_see_numbers(params)
        and 1 < math.prod(params["window_dimensions"]) <= MAX_TAPS
    )


def _replace(source: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    if params["window_dimensions"] == params["window_strides"]:
        gradient = _scatter_to_tiles(source, operand, **params)
    else:
        # Unfused: see the second table.
        gradient = _call_unfused(functools.partial(_sum_taps, **params), source, operand)
    # Where XLA vectorizes max pooling on CPU, it drops a NaN (jax 0.10 to 0.12). The gradient keeps
    # it, so that a step with a NaN can be recognized.
    return jnp.where(jnp.isnan(operand), operand, gradient)


def _scatter_to_tiles(source: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    """Computes the gradient if each number belongs to at most one window.

    Each axis is split into positions and taps: `[P, w, ...]` for each `[P w, ...]`.
    """
    window, padding = params["window_dimensions"], params["padding"]
    winner = _find_winners(source.shape, operand, window, window, padding)
    tiles = tuple(itertools.chain(*zip(source.shape, window, strict=True)))
    position_axes = tuple(range(0, 2 * source.ndim, 2))

    def spread_over_taps(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, tiles, position_axes)

    tap_number = jnp.zeros((), jnp.int32)
    for axis, taps in enumerate(window):
        tap_number = tap_number * taps + lax.broadcasted_iota(jnp.int32, tiles, 2 * axis + 1)
    # XLA adds to a sum that starts from 0, which turns -0 into 0; `source != 0` does the same.
    is_winner = (spread_over_taps(winner) == tap_number) & spread_over_taps(source != 0)
    out = jnp.where(is_winner, spread_over_taps(source), jnp.zeros((), source.dtype))
    sizes = [positions * taps for positions, taps in zip(source.shape, window, strict=True)]
    # Crops the padding, and pads the numbers at the end that no window sees.
    crops = [
        (-low, low + size - tiled_size, 0)
        for (low, _), size, tiled_size in zip(padding, operand.shape, sizes, strict=True)
    ]
    return lax.pad(out.reshape(sizes), jnp.zeros((), out.dtype), crops)


def _sum_taps(source: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    """Adds up, tap by tap, the gradients of the windows that this tap has won."""
    window, strides, padding = (
        params[name] for name in ("window_dimensions", "window_strides", "padding")
    )
    winner = _find_winners(source.shape, operand, window, strides, padding)
    total = jnp.zeros(operand.shape, at_least_float32(operand).dtype)
    taps = list(enumerate(itertools.product(*map(range, window))))
    # The last tap of a number belongs to its first window, so this adds the first window first.
    for tap_number, tap in reversed(taps):
        won = jnp.where(winner == tap_number, source, jnp.zeros((), source.dtype))
        won = at_least_float32(won)
        pads = []
        for start, (low, _), size, positions, stride in zip(
            tap, padding, operand.shape, source.shape, strides, strict=True
        ):
            offset = start - low
            pads.append((offset, size - offset - dilated_size(positions, stride), stride - 1))
        total += lax.pad(won, jnp.zeros((), won.dtype), pads)
    return lax.convert_element_type(total, operand.dtype)


def does_every_window_see_numbers(params: dict[str, Any]) -> bool:
    """Returns True if no window of a pooling sees only padding."""
    return all(
        min(ends) >= 0 and max(ends) < taps
        for ends, taps in zip(params["padding"], params["window_dimensions"], strict=True)
    )


def _find_winners(
    positions: Sequence[int],
    operand: jax.Array,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> jax.Array:
    """Returns the number of the tap that wins each window, `i32[*positions]`.

    The first tap is the winner until a tap comes that it is not >= to. Padding is -inf.
    """
    best, *others = _pool_views(operand, positions, window, strides, padding)
    winner = jnp.zeros(positions, jnp.int32)
    for tap_number, value in enumerate(others, start=1):
        # False if either is NaN, so a NaN replaces the winner and is replaced by the next tap.
        stays = best >= value
        best = jnp.where(stays, best, value)
        winner = jnp.where(stays, winner, tap_number)
    return winner


def _pool_views(
    x: jax.Array,
    positions: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> list[jax.Array]:
    """Returns what each tap of a pooling window sees at each position; padding is -inf.

    Args:
      x: The array that is pooled.
      positions: The number of positions along each axis, which is the shape of the results.
      window: The number of taps along each axis of `x`, as are the other parameters.
      strides: The distance between two positions.
      padding: The padding before and after each axis.
    """
    x = lax.pad(x, jnp.array(-jnp.inf, x.dtype), [(low, high, 0) for low, high in padding])
    # The sizes of the part of the array between the first and the last position of a tap.
    extents = list(map(dilated_size, positions, strides))
    views = []
    for tap in itertools.product(*map(range, window)):
        limits = [start + extent for start, extent in zip(tap, extents, strict=True)]
        views.append(lax.slice(x, tap, limits, strides))
    return views


def _call_unfused(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Returns ``function(*arrays)``, computed in a branch that is always taken.

    XLA cannot know that it is, so it does not fuse the operations of the function with the
    operations around it. The last array must not be empty.
    """

    def zeros(*arrays: jax.Array) -> jax.Array:
        return zeros_for_sum(jax.eval_shape(function, *arrays), *arrays)

    first_element = arrays[-1][(0,) * arrays[-1].ndim]
    # One of the two is true for every number; the second is true for NaN.
    always = (first_element == first_element) | (first_element != first_element)
    out: jax.Array = lax.cond(always, function, zeros, *arrays)
    return out


max_pool_gradient = Rewrite(
    name="max_pool_gradient",
    primitive=primitives.select_and_scatter_add_p,
    applies=_applies,
    replace=_replace,
    reason="comparing in place beats visiting the windows one by one",
)
