"""Convolutions without the taps and positions that see only padding.

If the kernel is larger than the image, such as a 3 x 3 kernel over the 1 x 1 image at the end of a
deep network, some taps see only padding. In the gradient of the weights, some positions do, and
their results are zeros. So the kernel is cropped, or the result padded; in the example a matrix
product remains, a ninth of the work. The same holds for groups: a depthwise 7 x 7 kernel over a
2 x 2 image, as in ConvNeXt, keeps 9 of 49 taps. XLA's CPU backend multiplies all taps:
`benchmarks/upstream/trimmed_conv.py` reproduces it.

An infinite weight at such a tap no longer gives NaN, because it is not multiplied by the zeros of
the padding. XLA may compute the rest by other kernels, which changes the last bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import conv_sizes
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._windows import conv_positions, dilated_size


class _Axis(NamedTuple):
    """The taps and positions along an axis that see the image."""

    taps: range
    positions: range


def _applies(eqn: core.JaxprEqn) -> bool:
    sizes = conv_sizes(eqn)
    if sizes is None:
        return False
    axes = _trim_axes(sizes.image, sizes.window, sizes.positions, eqn.params)
    untrimmed = list(map(_Axis, map(range, sizes.window), map(range, sizes.positions)))
    # At least one tap and position must remain, or the trimmed convolution would be empty.
    return axes != untrimmed and all(axis.taps and axis.positions for axis in axes)


def _trim_axes(
    image: Sequence[int], window: Sequence[int], positions: Sequence[int], params: dict[str, Any]
) -> list[_Axis]:
    names = ("padding", "window_strides", "lhs_dilation", "rhs_dilation")
    return list(map(_trim_axis, image, window, positions, *map(params.__getitem__, names)))


def _trim_axis(
    image: int,
    window: int,
    positions: int,
    padding: tuple[int, int],
    stride: int,
    image_dilation: int,
    kernel_dilation: int,
) -> _Axis:
    low, size = padding[0], dilated_size(image, image_dilation)
    taps = _inside_image(window, kernel_dilation, positions, stride, low, size)
    return _Axis(taps, _inside_image(positions, stride, window, kernel_dilation, low, size))


def _inside_image(
    count: int, step: int, other_count: int, other_step: int, low: int, size: int
) -> range:
    """Returns the taps that see the image from any position, or the positions that do by any tap.

    A tap (or position) i < count and a position (or tap) j < other_count meet at the element
    ``i step + j other_step - low`` of the image, which has `size` elements.
    """
    inside = []
    for i in range(count):
        # The first j for which the element is not in front of the image.
        first = max(0, -((i * step - low) // other_step))
        if first < other_count and i * step + first * other_step - low < size:
            inside.append(i)
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    numbers, strides = params["dimension_numbers"], params["window_strides"]
    image = list(map(lhs.shape.__getitem__, numbers.lhs_spec[2:]))
    window = list(map(rhs.shape.__getitem__, numbers.rhs_spec[2:]))
    dilated_image = list(map(dilated_size, image, params["lhs_dilation"]))
    positions = conv_positions(image, window, params)
    axes = _trim_axes(image, window, positions, params)
    padding = []
    for i, (taps, trimmed_positions) in enumerate(axes):
        rhs = lax.slice_in_dim(rhs, taps.start, taps.stop, axis=numbers.rhs_spec[2 + i])
        kernel_dilation, stride = params["rhs_dilation"][i], strides[i]
        # The padding that remains in front of the first tap at the first position, and the size
        # that the taps cover from the first position to the last. Both may crop the image.
        low, _ = params["padding"][i]
        low -= taps.start * kernel_dilation + trimmed_positions.start * stride
        covered = dilated_size(len(taps), kernel_dilation) + (len(trimmed_positions) - 1) * stride
        padding.append((low, covered - low - dilated_image[i]))
    params |= {"padding": tuple(padding)}
    out = primitives.conv_general_dilated_p.bind(lhs, rhs, **params)
    # The results of the positions that were removed are zeros.
    zeros_around = [(0, 0, 0)] * out.ndim
    for i, (axis, count) in enumerate(zip(axes, positions, strict=True)):
        before, after = axis.positions.start, count - axis.positions.stop
        zeros_around[numbers.out_spec[2 + i]] = (before, after, 0)
    return lax.pad(out, jnp.zeros((), out.dtype), zeros_around)


trimmed_conv = Rewrite(
    name="trimmed_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="some taps or positions see only padding",
)
