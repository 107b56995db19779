"""Depthwise convolutions as a sum of shifted products.

XLA's CPU backend computes them in slow kernels (https://github.com/jax-ml/jax/issues/23713, open),
and the gradient of the weights (a convolution whose window is the image) in even slower ones, which
`benchmarks/upstream/depthwise_gradient.py` reproduces. Milliseconds, on 2 cores with jax 0.10,
alone under `jit` and as the body of a scan (`jit/scan`); image `[N, H, H, C]`, kernel k, stride s,
channel multiplier m, float32 except for the last row:

    N H C k s m          forward as is -> shifts    of the input             of the weights
    8 16 96 3 1 1        4.0/3.8 -> 0.4/0.5         4.1/0.15 -> 0.5/0.5      2.9/168 -> 0.3/0.4
    8 8 240 5 1 1        4.0/3.8 -> 0.4/0.15        3.9/0.18 -> 0.3/0.15     8.0/420 -> 0.3/0.4
    8 8 96 7 1 1         2.4/2.2 -> 0.4/0.13        2.4/0.6 -> 0.5/0.15      3.1/108 -> 0.3/0.5
    8 2 960 3 1 1        2.3/2.2 -> 0.4/0.1         2.3/0.03 -> 0.3/0.1      28/35 -> 0.2/0.2
    8 16 96 3 2 1        1.2/1.0 -> 0.4/0.2         11/0.13 -> 0.7/0.5       1.0/32 -> 0.1/0.2
    8 56 96 3 1 1        45/47 -> 2.4/7.8           46/1.4 -> 2.3/5.8        7200/1870 -> 8.0/6.2
    8 16 32 3 1 2        1.5/1.3 -> 0.3/0.3         5.4/0.2 -> 0.3/0.3       101/1.0 -> 0.2/0.2
    8 56 32 3 1 4        18/19 -> 3.0/9.7           89/4.1 -> 3.7/7.4        3270/59 -> 6.8/12
    8 16 32 3 1 16       1.9/1.7 -> 0.9/2.1         (hence: at most 4)
    8 16 96 3 1 1, bf16  4.2/3.9 -> 0.9/0.3         4.2/0.2 -> 0.5/0.4       1.9/113 -> 1.2/0.3

Only the gradient of the input can be slower, and only in a scan; the layer as a whole never is. The
sums are computed in another order, which changes the last bits.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, primitives

from functrain.rewrites._conv import (
    at_least_float32,
    conv_groups,
    dilated_size,
    from_canonical,
    move_groups_last,
    output_sizes,
    pad_spatial,
    strided_window,
    to_canonical,
    zeros_for_sum,
)
from functrain.rewrites._equations import ndim
from functrain.rewrites._rewrite import rewrite

# Each tap is a slice in the program: 11 x 11 still compiles in a second, 31 x 31 would not.
MAX_TAPS = 128
# Wider groups are left to XLA's kernel.
MAX_CHANNELS = 4
# The number of sums that one pass computes: more run slower, fewer compile longer.
SUMS_PER_PASS = 25
# The number of terms that are written out. XLA repeats a sum in each operation that reads it, such
# as those of a normalization, but it does not repeat a loop. With fewer terms, the body of the loop
# would not use all cores.
MAX_TERMS = 32


def _applies(eqn: JaxprEqn) -> bool:
    groups = conv_groups(eqn)
    return (
        groups is not None
        and ndim(eqn.invars[0]) > 2
        and groups.taps <= MAX_TAPS
        and min(groups.sides) == 1
        and max(groups.sides) <= MAX_CHANNELS
    )


@rewrite(
    primitives.conv_general_dilated_p, _applies, "a sum of shifted products beats XLA's kernel"
)
def depthwise_conv(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Sums in float32 at least, as XLA's own kernels do, and rounds once."""
    dtype = params["preferred_element_type"] or lhs.dtype
    by_batch = params["batch_group_count"] > 1
    out = (_weight_gradient if by_batch else _sum_of_shifts)(lhs, rhs, params)
    out = lax.convert_element_type(out, dtype)
    return from_canonical(out, params["dimension_numbers"])


def _sum_of_shifts(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """`out[n, s, g, o] = sum over w, i of lhs[n, s + w, g, i] rhs[w, i, g, o]`.

    Image n, position s, group g, output o of the group; tap w, input i of the group. The formula
    leaves out strides, padding and holes.
    """
    lhs, rhs = to_canonical(lhs, rhs, params["dimension_numbers"])
    lhs = pad_spatial(lhs, params["padding"], params["lhs_dilation"])
    count, inputs, window = params["feature_group_count"], rhs.shape[-2], rhs.shape[:-2]
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    sizes = output_sizes(lhs.shape[1:-1], window, strides, dilation)
    rhs = jnp.swapaxes(rhs.reshape(*window, inputs, count, -1), -2, -1)  # [*W, I, O, G]
    bands, rows = _split_into_bands(window, inputs)

    def sum_band(first_row: Any, rows: int) -> jax.Array:
        """Sums over `rows` rows of taps."""
        height = dilated_size(sizes[0], strides[0]) + (rows - 1) * dilation[0]
        x = lax.dynamic_slice_in_dim(lhs, first_row * dilation[0], height, axis=1)
        kernel = lax.dynamic_slice_in_dim(rhs, first_row, rows)
        return functools.reduce(lax.add, terms(x, kernel))

    def terms(lhs: jax.Array, rhs: jax.Array) -> Iterator[jax.Array]:
        """Yields `[N, *S', O, G]` for each tap and input."""
        number, weights = itertools.count(), lax.collapse(rhs, 0, rhs.ndim - 2)
        for tap in itertools.product(*map(range, rhs.shape[:-3])):
            x = strided_window(lhs, tap, dilation, sizes, strides)
            x = x.reshape(*x.shape[:-1], count, inputs)
            for i in range(inputs):
                weight = lax.index_in_dim(weights, next(number), keepdims=False)
                x_i = lax.index_in_dim(x, i, axis=-1, keepdims=False)
                yield at_least_float32(jnp.expand_dims(x_i, -2)) * at_least_float32(weight)

    if bands == 1:
        out = functools.reduce(lax.add, terms(lhs, rhs))
    else:
        # The rows that are left over initialize the sum.
        leftover = window[0] - bands * rows
        like = jax.eval_shape(lambda: sum_band(0, rows))
        start = sum_band(bands * rows, leftover) if leftover else zeros_for_sum(like, lhs, rhs)
        out = lax.fori_loop(0, bands, lambda i, total: total + sum_band(i * rows, rows), start)
    out = jnp.swapaxes(out, -1, -2)
    return lax.collapse(out, out.ndim - 2)


def _split_into_bands(window: Sequence[int], inputs: int) -> tuple[int, int]:
    """Returns the number of bands of a loop and the rows of taps in each; some may be left over."""
    bands = -(-math.prod(window) * inputs // MAX_TERMS)
    rows = max(1, window[0] // bands)
    return window[0] // rows, rows


def _weight_gradient(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """`out[n, s, g, o] = sum over w, i of lhs[g, n, s + w, i] rhs[w, i, g, o]`.

    Input n of the group, tap s of the result, group g, output o of the group; pixel w, image i.
    Here the window is as large as an image and the result as small as a kernel, with one sum for
    each position. Several sums are computed in one pass over the image, which XLA compiles to one
    kernel. Each image is summed first, because XLA sums a batch one number after the other.
    """
    numbers, count = params["dimension_numbers"], params["batch_group_count"]
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    # The canonical layout is avoided: it would transpose the images twice.
    batch, feature, *spatial = numbers.lhs_spec
    lhs = lax.transpose(lhs, (feature, *spatial, batch))
    lhs = move_groups_last(pad_spatial(lhs, params["padding"], params["lhs_dilation"]), count)
    features, into, *window_axes = numbers.rhs_spec
    rhs = move_groups_last(lax.transpose(rhs, (into, *window_axes, features)), count)
    window = rhs.shape[1:-1]
    rhs = at_least_float32(rhs).reshape(*rhs.shape[:-1], 1, -1, count)  # [I, *W, 1, O, G]
    sizes = output_sizes(lhs.shape[1:-1], window, strides, dilation)

    def products(position: Sequence[int]) -> jax.Array:
        x = at_least_float32(strided_window(lhs, position, strides, window, dilation))
        return x.reshape(*x.shape[:-1], -1, 1, count) * rhs  # [I, *W, N, O, G]

    positions = list(itertools.product(*map(range, sizes)))
    sums: list[jax.Array] = []
    for first in range(0, len(positions), SUMS_PER_PASS):
        sums += _sum_each_image(list(map(products, positions[first : first + SUMS_PER_PASS])))
    out = jnp.sum(jnp.stack(sums), axis=1)  # [S', N, O, G]
    out = jnp.swapaxes(out, -1, -2).reshape(*sizes, out.shape[1], -1)
    return jnp.moveaxis(out, -2, 0)


def _sum_each_image(xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Sums each array over all but its first and its last three axes, all in one pass."""

    def add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return list(map(lax.add, a, b))

    zeros = [np.zeros((), x.dtype) for x in xs]
    sums: Sequence[jax.Array] = lax.reduce(xs, zeros, add, tuple(range(1, xs[0].ndim - 3)))
    return sums
