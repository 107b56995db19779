"""Depthwise convolutions as a sum of shifted products."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from functrain.rewrites._windows import (
    at_least_float32,
    pad_spatial,
    strided_window,
    zeros_for_sum,
)
from functrain.rewrites.convolution._description import Convolution, dilated_size
from functrain.rewrites.convolution._method import Convolve, Method

# Each tap is a slice in the program: 11 x 11 still compiles in a second, 31 x 31 would not.
MAX_TAPS = 128
# Wider groups are matrix products, one after the other.
MAX_CHANNELS = 4
# The number of sums that one pass computes: more run slower, fewer compile longer.
SUMS_PER_PASS = 25
# The number of terms that are written out. XLA repeats a sum in each operation that reads it, such
# as those of a normalization, but it does not repeat a loop. With fewer terms, the body of the loop
# would not use all cores.
MAX_TERMS = 32


def is_depthwise(conv: Convolution) -> bool:
    """Returns True if a convolution, or gradient, has one input or one output in each group."""
    return _sums_taps(conv) or _sums_pixels(conv)


def _sums_taps(conv: Convolution) -> bool:
    sides = (conv.channels, conv.features // conv.groups)
    return (
        conv.groups > 1
        and conv.batch_groups == 1
        and min(sides) == 1
        and max(sides) <= MAX_CHANNELS
        and math.prod(conv.window) <= MAX_TAPS
    )


def _sums_pixels(conv: Convolution) -> bool:
    sides = (conv.batch // conv.batch_groups, conv.features // conv.batch_groups)
    return (
        conv.batch_groups > 1
        and min(sides) == 1
        and max(sides) <= MAX_CHANNELS
        and math.prod(conv.positions) <= MAX_TAPS
    )


def _features(conv: Convolution) -> Mapping[str, float]:
    taps, results = math.prod(conv.window), conv.batch * math.prod(conv.positions) * conv.features
    if conv.batch_groups > 1:
        results //= conv.batch_groups
    return {
        "calls": 1,
        "slices": min(taps, math.prod(conv.positions)),
        "products": results * taps * conv.channels,
        "results": results,
        "operands": conv.batch * math.prod(conv.image) * conv.channels * conv.groups,
    }


def _lower(conv: Convolution, lhs: jax.Array, rhs: jax.Array, convolve: Convolve) -> jax.Array:
    """`out[n, s, g, o] = sum over w, i of lhs[n, s + w, g, i] rhs[w, i, g, o]`.

    Image n, position s, group g, output o of the group; tap w, input i of the group. The formula
    leaves out strides, padding and holes.
    """
    lhs = pad_spatial(lhs, conv.padding, conv.image_dilation)
    inputs, window, dilation = conv.channels, conv.window, conv.window_dilation
    rhs = jnp.swapaxes(rhs.reshape(*window, inputs, conv.groups, -1), -2, -1)  # [*W, I, O, G]
    bands, rows = _split_into_bands(window, inputs)

    def sum_band(first_row: Any, rows: int) -> jax.Array:
        """Sums over `rows` rows of taps."""
        height = dilated_size(conv.positions[0], conv.strides[0]) + (rows - 1) * dilation[0]
        x = lax.dynamic_slice_in_dim(lhs, first_row * dilation[0], height, axis=1)
        kernel = lax.dynamic_slice_in_dim(rhs, first_row, rows)
        return functools.reduce(lax.add, terms(x, kernel))

    def terms(lhs: jax.Array, rhs: jax.Array) -> Iterator[jax.Array]:
        """Yields `[N, *P, O, G]` for each tap and input."""
        number, weights = itertools.count(), lax.collapse(rhs, 0, rhs.ndim - 2)
        for tap in itertools.product(*map(range, rhs.shape[:-3])):
            x = strided_window(lhs, tap, dilation, conv.positions, conv.strides)
            x = x.reshape(*x.shape[:-1], conv.groups, inputs)
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
    return lax.convert_element_type(lax.collapse(out, out.ndim - 2), conv.out_dtype)


def _split_into_bands(window: Sequence[int], inputs: int) -> tuple[int, int]:
    """Returns the number of bands of a loop and the rows of taps in each; some may be left over."""
    bands = -(-math.prod(window) * inputs // MAX_TERMS)
    rows = max(1, window[0] // bands)
    return window[0] // rows, rows


def _lower_gradient(
    conv: Convolution, lhs: jax.Array, rhs: jax.Array, convolve: Convolve
) -> jax.Array:
    """`out[n, s, g, o] = sum over w, i of lhs[g, n, s + w, i] rhs[w, i, g, o]`.

    Input n of the group, tap s of the result, group g, output o of the group; pixel w, image i.
    Here the window is as large as an image and the result as small as a kernel, with one sum for
    each position. Several sums are computed in one pass over the image, which XLA compiles to one
    kernel. Each image is summed first, because XLA sums a batch one number after the other.
    """
    count, last = conv.batch_groups, lhs.ndim - 1
    lhs = lax.transpose(lhs, (last, *range(1, last), 0))
    lhs = _move_groups_last(pad_spatial(lhs, conv.padding, conv.image_dilation), count)
    rhs = _move_groups_last(lax.transpose(rhs, (last - 1, *range(last - 1), last)), count)
    rhs = at_least_float32(rhs).reshape(*rhs.shape[:-1], 1, -1, count)  # [I, *W, 1, O, G]

    def products(position: Sequence[int]) -> jax.Array:
        x = strided_window(lhs, position, conv.strides, conv.window, conv.window_dilation)
        x = at_least_float32(x)
        return x.reshape(*x.shape[:-1], -1, 1, count) * rhs  # [I, *W, N, O, G]

    positions = list(itertools.product(*map(range, conv.positions)))
    sums: list[jax.Array] = []
    for first in range(0, len(positions), SUMS_PER_PASS):
        sums += _sum_each_image(list(map(products, positions[first : first + SUMS_PER_PASS])))
    out = jnp.sum(jnp.stack(sums), axis=1)  # [P, N, O, G]
    out = jnp.swapaxes(out, -1, -2).reshape(*conv.positions, out.shape[1], -1)
    return lax.convert_element_type(jnp.moveaxis(out, -2, 0), conv.out_dtype)


def _sum_each_image(xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Sums each array over all but its first and its last three axes, all in one pass."""

    def add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
        return list(map(lax.add, a, b))

    zeros = [np.zeros((), x.dtype) for x in xs]
    sums: Sequence[jax.Array] = lax.reduce(xs, zeros, add, tuple(range(1, xs[0].ndim - 3)))
    return sums


def _move_groups_last(x: jax.Array, count: int) -> jax.Array:
    """Transposes `[..., G C]` to `[..., C G]`, with G = `count`."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], count, -1), -1, -2).reshape(x.shape)


depthwise = Method("depthwise", _sums_taps, _features, _lower)
depthwise_gradient = Method("depthwise_gradient", _sums_pixels, _features, _lower_gradient)
