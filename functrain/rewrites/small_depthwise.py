"""Depthwise convolutions of images with fewer pixels than the kernel has taps.

A convolution can be written as a sum over taps or over pixels. If there are fewer pixels, such as
for a 7 x 7 kernel over a 4 x 4 image, the sum has 16 terms instead of 49, and no products with
padding. The same holds for the gradient of the weights. Its sum over the images is a loop, because
XLA's own reductions over a batch are not vectorized. For what XLA does, see `depthwise_conv`
(https://github.com/jax-ml/jax/issues/23713, open, and `benchmarks/upstream/depthwise_gradient.py`).
Milliseconds under `jit`, on 2 cores with jax 0.10, in comparison with `depthwise_conv`; image
`[N, H, H, C]`, kernel k, stride s, channel multiplier m:

    N H C k s m         forward      of the input of the weights
    16 4 192 7 1 1      0.24 -> 0.04 0.14 -> 0.04 0.67 -> 0.10
    64 4 192 7 1 1      0.69 -> 0.15 0.98 -> 0.11 3.2 -> 0.43
    16 4 240 5 1 1      0.11 -> 0.05 0.11 -> 0.07 0.36 -> 0.09
    16 3 256 5 1 1      0.11 -> 0.02 0.10 -> 0.05 0.71 -> 0.04
    16 2 960 3 1 1      0.07 -> 0.03 0.06 -> 0.02 0.18 -> 0.04
    16 4 240 5 2 1      0.09 -> 0.03 0.29 -> 0.05 (as it was)
    16 4 96 5 1 2       0.30 -> 0.19 (as it was)  0.32 -> 0.08
    16 4 192 7 1 1 bf16 0.57 -> 0.19 0.42 -> 0.12 0.98 -> 0.12

An infinite weight that meets padding no longer gives NaN. The sums are computed in another order,
which changes the last bits.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import (
    conv_groups,
    conv_sizes,
    from_canonical,
    move_groups_last,
    to_canonical,
)
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._windows import at_least_float32, conv_positions, zeros_for_sum
from functrain.rewrites.depthwise_conv import MAX_CHANNELS

# Terms are written out; with more of them that miss some pixels, the sum over taps is faster.
MAX_TERMS = 16
# The gradient of the weights keeps one window for each pixel in the carry of its loop.
MAX_PARTS = 32
# The number of images that are summed one after the other. A single sum over thousands of images
# would lose digits.
IMAGES_PER_SUM = 64


def _applies(eqn: core.JaxprEqn) -> bool:
    groups, sizes = conv_groups(eqn), conv_sizes(eqn)
    if groups is None or sizes is None:
        return False
    if min(groups.sides) > 1 or max(groups.sides) > MAX_CHANNELS:
        return False
    pixels = math.prod(sizes.image)
    if math.prod(eqn.params["rhs_dilation"]) > 1 or pixels >= groups.taps:
        return False
    if groups.by_batch:
        return pixels <= MAX_PARTS and _is_plain(eqn.params)
    if pixels * groups.sides[0] > MAX_TERMS:
        return False
    # Every pixel must be seen from some position along each axis.
    axes = _make_axes(sizes.image, sizes.window, eqn.params)
    return all(_positions_that_see(pixel, axis) for axis in axes for pixel in range(axis.image))


def _is_plain(params: dict[str, Any]) -> bool:
    """Returns True if there are no strides, and no holes in the image."""
    return all(size == 1 for size in (*params["window_strides"], *params["lhs_dilation"]))


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Sums in float32 at least, and rounds once."""
    dtype = params["preferred_element_type"] or lhs.dtype
    by_batch = params["batch_group_count"] > 1
    out = (_weight_gradient if by_batch else _sum_over_pixels)(lhs, rhs, params)
    return from_canonical(lax.convert_element_type(out, dtype), params["dimension_numbers"])


def _sum_over_pixels(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """`out[n, s, g, o] = sum over p, i of lhs[n, p, g, i] rhs[p - s, i, g, o]`.

    Image n, position s, group g, output o of the group; pixel p, input i of the group. A tap
    `p - s` outside of the window is 0. The formula leaves out strides, padding and holes.
    """
    lhs, rhs = to_canonical(lhs, rhs, params["dimension_numbers"])
    count, inputs, (_, *image, _) = params["feature_group_count"], rhs.shape[-2], lhs.shape
    window = rhs.shape[:-2]
    rhs = jnp.swapaxes(rhs.reshape(*window, inputs, count, -1), -2, -1)
    # As the position moves forward, the tap that sees a pixel moves backward. With reversed taps,
    # the taps that see it from consecutive positions are a slice.
    rhs = lax.rev(rhs, tuple(range(len(window))))  # [*W, I, O, G]
    axes = _make_axes(image, window, params)

    def terms() -> Iterator[jax.Array]:
        """Yields `[N, *S', O, G]` for each pixel and input; 0 where the window misses the pixel."""
        for pixel in itertools.product(*map(range, image)):
            x = lhs[(slice(None), *pixel)].reshape(-1, *[1] * len(image), count, inputs)
            taps, pads = zip(*map(_taps_that_see, pixel, axes), strict=True)
            weights = rhs[taps]
            for i in range(inputs):
                x_i, weights_i = x[..., None, :, i], weights[..., i, :, :]
                product = at_least_float32(x_i) * at_least_float32(weights_i)
                zero = jnp.zeros((), product.dtype)
                yield lax.pad(product, zero, [(0, 0, 0), *pads, (0, 0, 0), (0, 0, 0)])

    out = jnp.swapaxes(functools.reduce(lax.add, terms()), -1, -2)
    return lax.collapse(out, out.ndim - 2)


class _Axis(NamedTuple):
    """The sizes of a convolution along one axis."""

    image: int
    window: int
    positions: int
    padding: tuple[int, int]
    stride: int
    dilation: int


def _make_axes(image: Sequence[int], window: Sequence[int], params: dict[str, Any]) -> list[_Axis]:
    options = (params["padding"], params["window_strides"], params["lhs_dilation"])
    return list(map(_Axis, image, window, conv_positions(image, window, params), *options))


def _first_tap(pixel: int, axis: _Axis) -> int:
    """Returns the number of the reversed tap that sees a pixel from the first position.

    The number is outside of the window if the first position does not see the pixel.
    """
    return axis.window - 1 - axis.padding[0] - pixel * axis.dilation


def _positions_that_see(pixel: int, axis: _Axis) -> range:
    """Returns the positions that see a pixel."""
    first_tap, taps = _first_tap(pixel, axis), range(axis.window)
    seeing = [p for p in range(axis.positions) if first_tap + axis.stride * p in taps]
    return range(seeing[0], seeing[-1] + 1) if seeing else range(0)


def _taps_that_see(pixel: int, axis: _Axis) -> tuple[slice, tuple[int, int, int]]:
    """Returns the reversed taps that see a pixel, and the padding for positions that do not."""
    positions, first_tap = _positions_that_see(pixel, axis), _first_tap(pixel, axis)
    start = first_tap + axis.stride * positions[0]
    last = first_tap + axis.stride * positions[-1]
    padding = (positions[0], axis.positions - 1 - positions[-1], 0)
    return slice(start, last + 1, axis.stride), padding


def _weight_gradient(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """`out[n, s, g, o] = sum over p, i of lhs[g, n, p, i] rhs[p - s, i, g, o]`.

    Image i, input n of the group, pixel p, group g, output o of the group, tap s of the result.
    Here the window is the gradient of the output, and the result is as small as a kernel. The
    products of each pixel with the whole window are summed over the images, and each of these sums
    is then added to the part of the result that it belongs to.
    """
    numbers, count = params["dimension_numbers"], params["batch_group_count"]
    batch, feature, *spatial = numbers.lhs_spec
    lhs = move_groups_last(lax.transpose(lhs, (feature, *spatial, batch)), count)  # [I, *S, N G]
    features, into, *window_axes = numbers.rhs_spec
    rhs = move_groups_last(lax.transpose(rhs, (into, *window_axes, features)), count)
    images, *image = lhs.shape[:-1]
    window, ones = rhs.shape[1:-1], (1,) * len(image)
    lhs = lhs.reshape(images, *image, *ones, -1, 1, count)
    rhs = rhs.reshape(images, *ones, *window, 1, -1, count)

    def products(i: Any) -> jax.Array:
        x = lax.dynamic_index_in_dim(lhs, i, keepdims=False)
        g = lax.dynamic_index_in_dim(rhs, i, keepdims=False)
        return at_least_float32(x) * at_least_float32(g)  # [*S, *W, N, O, G]

    start = zeros_for_sum(jax.eval_shape(products, 0), lhs, rhs)

    def sum_images(first: Any) -> jax.Array:
        last = jnp.minimum(first + IMAGES_PER_SUM, images)
        out: jax.Array = lax.fori_loop(first, last, lambda i, total: total + products(i), start)
        return out

    sums, chunks = sum_images(0), -(-images // IMAGES_PER_SUM)
    # For a single chunk, the outer loop would be traced for nothing.
    if chunks > 1:
        sums = lax.fori_loop(
            1, chunks, lambda i, total: total + sum_images(i * IMAGES_PER_SUM), sums
        )
    axes = list(zip(image, window, params["padding"], strict=True))

    def pad_to_result(pixel: Sequence[int]) -> jax.Array:
        pads = [*map(_pads_to_result, pixel, axes), *[(0, 0, 0)] * 3]
        return lax.pad(sums[tuple(pixel)], jnp.zeros((), sums.dtype), pads)

    terms = map(pad_to_result, itertools.product(*map(range, image)))
    out = functools.reduce(lax.add, terms)
    out = lax.rev(out, tuple(range(len(image))))  # [*S', N, O, G]
    out = lax.collapse(jnp.swapaxes(out, -1, -2), out.ndim - 2)
    return jnp.moveaxis(out, -2, 0)


def _pads_to_result(pixel: int, axis: tuple[int, int, tuple[int, int]]) -> tuple[int, int, int]:
    """Returns the padding, or cropping, of a window to the size of the reversed result.

    At the last position of the result, the pixel meets element ``-before`` of the window.
    """
    size, window, (low, high) = axis
    positions = size + low + high - window + 1
    before = positions - 1 - low - pixel
    return before, positions - before - window, 0


small_depthwise = Rewrite(
    name="small_depthwise",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="the image has fewer pixels than the kernel has taps",
)
