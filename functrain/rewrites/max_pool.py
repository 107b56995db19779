"""Maximum pooling as a maximum of strided slices, one for each tap of the window.

XLA's `reduce_window` is slower on CPU. On jax 0.12 it is as fast alone, but slices are fused with
the operations around them: with `reduce_window` a step of the benchmark's convnet takes 1.06 times
as long.

Milliseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`); image `[N, H, H, C]`,
window k x k, stride s:

    N H C k s       as is -> slices
    32 26 32 2 2    0.10/0.37 -> 0.04/0.26
    32 10 64 2 2    0.10/0.11 -> 0.02/0.07
    4 8 8 2 2       0.01/0.01 -> 0.01/0.01
    8 58 64 3 2     2.0/2.9 -> 0.24/1.3
    16 16 64 3 1    0.54/1.1 -> 0.32/0.25

Windows that do not overlap are kept in programs without a gradient: XLA may compile a whole network
that only predicts into one operation, including convolutions and pools. Milliseconds of two
convolutions of 3 x 3 with padding P (32 and 64 features, ReLU), each pooled by 2, and a dense
layer, in a loop; on a busy machine, with the median of the ratios of 25 rounds:

    N H C P         as is -> slices
    32 28 1 valid   2.7 -> 4.0    (1.6 times as long)
    256 28 1 valid  21 -> 58      (3.0)
    16 64 3 valid   30 -> 41      (1.4; three convolutions)
    32 28 1 same    6.3 -> 7.5    (1.0)
    32 32 3 same    19 -> 17      (0.9)

The rewrite alone keeps every bit. But XLA fuses the slices with the operations around them, which
may then round differently.
"""

import functools
import math
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import are_floats, avals
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._windows import MAX_POOL_TAPS, output_sizes, pool_views


def _applies(eqn: core.JaxprEqn) -> bool:
    return _can_be_slices(eqn) and not _are_windows_disjoint(eqn)


def _applies_if_disjoint(eqn: core.JaxprEqn) -> bool:
    return _can_be_slices(eqn) and _are_windows_disjoint(eqn)


def _are_windows_disjoint(eqn: core.JaxprEqn) -> bool:
    sizes = zip(eqn.params["window_dimensions"], eqn.params["window_strides"], strict=True)
    return all(window <= stride for window, stride in sizes)


def _can_be_slices(eqn: core.JaxprEqn) -> bool:
    params = eqn.params
    return (
        are_floats(*avals(eqn))
        and math.prod(params["base_dilation"]) == math.prod(params["window_dilation"]) == 1
        and 1 < math.prod(params["window_dimensions"]) <= MAX_POOL_TAPS
    )


def _replace(x: jax.Array, **params: Any) -> jax.Array:
    window, strides, padding = (
        params[name] for name in ("window_dimensions", "window_strides", "padding")
    )
    sizes = [size + sum(ends) for size, ends in zip(x.shape, padding, strict=True)]
    positions = output_sizes(sizes, window, strides, [1] * x.ndim)
    return functools.reduce(lax.max, pool_views(x, positions, window, strides, padding))


max_pool = Rewrite(
    name="max_pool",
    primitive=primitives.reduce_window_max_p,
    applies=_applies,
    replace=_replace,
    reason="a maximum of strided slices beats visiting the windows one by one",
)
# A rule of its own, because only disjoint windows require a gradient: see the second table.
max_pool_apart = max_pool._replace(
    name="max_pool_apart",
    applies=_applies_if_disjoint,
    required_primitive=primitives.select_and_scatter_add_p,
)
