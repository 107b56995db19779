"""Depthwise convolutions of images with fewer pixels than the kernel has taps.

A convolution is a sum over taps, and as well one over pixels: where these are fewer, as for a
7 x 7 kernel over a 4 x 4 image, the sum has 16 terms instead of 49, and no product with padding.
So has the gradient of the weights, whose sum over the images is a loop: XLA's own reductions over
a batch are not vectorized. Milliseconds under `jit`, on 2 cores with jax 0.10, beside
`depthwise_conv`; image `[N, H, H, C]`, kernel k, stride s, channel multiplier m:

    N H C k s m         forward      of the input of the weights
    16 4 192 7 1 1      0.24 -> 0.04 0.14 -> 0.04 0.67 -> 0.10
    64 4 192 7 1 1      0.69 -> 0.15 0.98 -> 0.11 3.2 -> 0.43
    16 4 240 5 1 1      0.11 -> 0.05 0.11 -> 0.07 0.36 -> 0.09
    16 3 256 5 1 1      0.11 -> 0.02 0.10 -> 0.05 0.71 -> 0.04
    16 2 960 3 1 1      0.07 -> 0.03 0.06 -> 0.02 0.18 -> 0.04
    16 4 240 5 2 1      0.09 -> 0.03 0.29 -> 0.05 (as it was)
    16 4 96 5 1 2       0.30 -> 0.19 (as it was)  0.32 -> 0.08
    16 4 192 7 1 1 bf16 0.57 -> 0.19 0.42 -> 0.12 0.98 -> 0.12

An infinite weight that meets padding gives no NaN any more. The sums are taken in another order:
last bits change.
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
from functrain.rewrites._frame import Rewrite
from functrain.rewrites._windows import at_least_float32, dilated_size, output_sizes, zeros_for_sum
from functrain.rewrites.depthwise_conv import MAX_CHANNELS

# Terms are written out; with more of them that miss some pixels, the sum over taps is faster.
MAX_TERMS = 16
# As many parts of the gradient of the weights are kept in a loop: for each, a window.
MAX_PARTS = 32
# How many images are summed one after the other: one sum over thousands would lose digits.
TOGETHER = 64


def _applies(eqn: core.JaxprEqn) -> bool:
    group, shape = conv_groups(eqn), conv_sizes(eqn)
    if group is None or shape is None or min(group.sides) > 1 or max(group.sides) > MAX_CHANNELS:
        return False
    pixels, ones = math.prod(shape.image), (1,) * len(shape.image)
    if eqn.params["rhs_dilation"] != ones or pixels >= group.taps:
        return False
    if group.by_batch:
        return pixels <= MAX_PARTS and _is_plain(eqn.params)
    axes = _axes(shape.image, shape.window, eqn.params)
    seen = (_seen(pixel, axis) for axis in axes for pixel in range(axis.image))
    return pixels * group.sides[0] <= MAX_TERMS and all(seen)


def _is_plain(params: dict[str, Any]) -> bool:
    """Whether there are no strides and no holes in the image."""
    return all(size == 1 for size in (*params["window_strides"], *params["lhs_dilation"]))


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Sums in float32 at least, and rounds once."""
    dtype = params["preferred_element_type"] or lhs.dtype
    by_batch = params["batch_group_count"] > 1
    out = (_weight_gradient if by_batch else _sum_over_pixels)(lhs, rhs, params)
    return from_canonical(lax.convert_element_type(out, dtype), params["dimension_numbers"])


def _sum_over_pixels(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """`out[n, s, g, o] = sum over p, i of lhs[n, p, g, i] rhs[p - s, i, g, o]`."""
    lhs, rhs = to_canonical(lhs, rhs, params["dimension_numbers"])
    count, inputs, (_, *image, _) = params["feature_group_count"], rhs.shape[-2], lhs.shape
    window = rhs.shape[:-2]
    rhs = jnp.swapaxes(rhs.reshape(*window, inputs, count, -1), -2, -1)
    rhs = lax.rev(rhs, tuple(range(len(window))))  # [*W, I, O, G]: turned over
    axes = _axes(image, window, params)

    def terms() -> Iterator[jax.Array]:
        """Yields `[N, *S', O, G]` for each pixel and input; 0 where the window misses the pixel."""
        for pixel in itertools.product(*map(range, image)):
            x = lhs[(slice(None), *pixel)].reshape(-1, *(1 for _ in image), count, inputs)
            taps, around = zip(*map(_taps, pixel, axes), strict=True)
            w = rhs[taps]
            for i in range(inputs):
                product = at_least_float32(x[..., None, :, i]) * at_least_float32(w[..., i, :, :])
                yield lax.pad(
                    product,
                    jnp.zeros((), product.dtype),
                    [(0, 0, 0), *around, (0, 0, 0), (0, 0, 0)],
                )

    out = jnp.swapaxes(functools.reduce(lax.add, terms()), -1, -2)
    return lax.collapse(out, out.ndim - 2)


class _Axis(NamedTuple):
    image: int
    window: int
    padding: tuple[int, int]
    stride: int
    holes: int

    @property
    def places(self) -> int:
        size = dilated_size(self.image, self.holes) + sum(self.padding)
        return output_sizes([size], [self.window], [self.stride], [1])[0]


def _axes(image: Sequence[int], window: Sequence[int], params: dict[str, Any]) -> list[_Axis]:
    options = (params[name] for name in ("padding", "window_strides", "lhs_dilation"))
    return list(map(_Axis, image, window, *options))


def _tap(pixel: int, axis: _Axis) -> int:
    """Returns by which tap, turned over, the first place sees a pixel, if there is such a tap."""
    return axis.window - 1 - axis.padding[0] - pixel * axis.holes


def _seen(pixel: int, axis: _Axis) -> range:
    """Returns the places that see a pixel."""
    first, taps = _tap(pixel, axis), range(axis.window)
    places = [s for s in range(axis.places) if first + axis.stride * s in taps]
    return range(places[0], places[-1] + 1) if places else range(0)


def _taps(pixel: int, axis: _Axis) -> tuple[slice, tuple[int, int, int]]:
    """Returns the taps, turned over, that see a pixel, and how many places around do not."""
    places, first = _seen(pixel, axis), _tap(pixel, axis)
    start, last = (first + axis.stride * s for s in (places[0], places[-1]))
    return slice(start, last + 1, axis.stride), (places[0], axis.places - 1 - places[-1], 0)


def _weight_gradient(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """`out[n, s, g, o] = sum over p, i of lhs[g, n, p, i] rhs[p - s, i, g, o]`.

    The window is a gradient here, and the result as small as a kernel. Each pixel times all of the
    window is summed over the images; each of these sums then goes where it belongs.
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
        x, g = (lax.dynamic_index_in_dim(of, i, keepdims=False) for of in (lhs, rhs))
        return at_least_float32(x) * at_least_float32(g)  # [*S, *W, N, O, G]

    start = zeros_for_sum(jax.eval_shape(products, 0), lhs, rhs)

    def some(first: Any) -> jax.Array:
        last = jnp.minimum(first + TOGETHER, images)
        total: jax.Array = lax.fori_loop(first, last, lambda i, so_far: so_far + products(i), start)
        return total

    sums, chunks = some(0), -(-images // TOGETHER)
    if chunks > 1:  # else the loop would be traced for nothing
        sums = lax.fori_loop(1, chunks, lambda i, total: total + some(i * TOGETHER), sums)
    axes = list(zip(image, window, params["padding"], strict=True))

    def placed(pixel: Sequence[int]) -> jax.Array:
        around = [*map(_around, pixel, axes), *[(0, 0, 0)] * 3]
        return lax.pad(sums[tuple(pixel)], jnp.zeros((), sums.dtype), around)

    out = functools.reduce(lax.add, map(placed, itertools.product(*map(range, image))))
    out = lax.rev(out, tuple(range(len(image))))  # [*S', N, O, G]
    out = lax.collapse(jnp.swapaxes(out, -1, -2), out.ndim - 2)
    return jnp.moveaxis(out, -2, 0)


def _around(pixel: int, axis: tuple[int, int, tuple[int, int]]) -> tuple[int, int, int]:
    """Returns how far a window is from the ends of the result, turned over, along an axis.

    The last place of the result sees the pixel by the element ``-before`` of the window.
    """
    size, window, (low, high) = axis
    places = size + low + high - window + 1
    before = places - 1 - low - pixel
    return before, places - before - window, 0


small_depthwise = Rewrite(
    name="small_depthwise",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="the image has fewer pixels than the kernel has taps",
)
