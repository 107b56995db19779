"""Convolutions without the taps and places that see nothing but padding.

Where the kernel is larger than the image, as a 3 x 3 kernel over the 1 x 1 image that is left at
the end of a deep network, some taps meet padding only, and in the gradient of the weights some
places do: their results are zeros. So the kernel is cropped, or the result padded, and in the
example a product of matrices is left, a ninth of the work. So it is with groups: a depthwise 7 x 7
kernel over a 2 x 2 image, as in ConvNeXt, keeps 9 taps of 49.

An infinite weight at such a tap gives no NaN any more, since it meets no zero of the padding.
Other kernels of XLA may take the rest: last bits change.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import conv_sizes
from functrain.rewrites._frame import Rewrite
from functrain.rewrites._windows import dilated_size, output_sizes


class _Axis(NamedTuple):
    """The taps and places that are left along an axis."""

    taps: range
    places: range


def _applies(eqn: core.JaxprEqn) -> bool:
    shape = conv_sizes(eqn)
    if shape is None:
        return False
    axes = _axes(shape.image, shape.window, shape.positions, eqn.params)
    whole = [_Axis(range(w), range(p)) for w, p in zip(shape.window, shape.positions, strict=True)]
    return axes != whole and all(axis.taps and axis.places for axis in axes)


def _axes(
    image: Sequence[int], window: Sequence[int], places: Sequence[int], params: dict[str, Any]
) -> list[_Axis]:
    names = ("padding", "window_strides", "lhs_dilation", "rhs_dilation")
    numbers = (image, window, places, *(params[name] for name in names))
    return [_axis(*axis) for axis in zip(*numbers, strict=True)]


def _axis(
    image: int,
    window: int,
    places: int,
    padding: tuple[int, int],
    stride: int,
    holes: int,
    apart: int,
) -> _Axis:
    low, size = padding[0], dilated_size(image, holes)
    taps = _within(window, apart, places, stride, low, size)
    return _Axis(taps, _within(places, stride, window, apart, low, size))


def _within(count: int, step: int, others: int, other_step: int, low: int, size: int) -> range:
    """Returns the i < count with 0 <= i step + j other_step - low < size for a j < others."""
    seen = []
    for i in range(count):
        first = max(0, -((i * step - low) // other_step))  # the least j that is not before
        if first < others and i * step + first * other_step - low < size:
            seen.append(i)
    return range(seen[0], seen[-1] + 1) if seen else range(0)


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    numbers, strides = params["dimension_numbers"], params["window_strides"]
    image = [lhs.shape[axis] for axis in numbers.lhs_spec[2:]]
    window = [rhs.shape[axis] for axis in numbers.rhs_spec[2:]]
    full = [
        low + dilated_size(size, holes) + high
        for size, (low, high), holes in zip(
            image, params["padding"], params["lhs_dilation"], strict=True
        )
    ]
    places = output_sizes(full, window, strides, params["rhs_dilation"])
    axes = _axes(image, window, places, params)
    padding = []
    for i, axis in enumerate(axes):
        rhs = lax.slice_in_dim(rhs, axis.taps.start, axis.taps.stop, axis=numbers.rhs_spec[2 + i])
        apart, stride = params["rhs_dilation"][i], strides[i]
        low, _ = params["padding"][i]
        low -= axis.taps.start * apart + axis.places.start * stride
        seen = dilated_size(len(axis.taps), apart) + (len(axis.places) - 1) * stride
        padding.append((low, seen - low - dilated_size(image[i], params["lhs_dilation"][i])))
    params |= {"padding": tuple(padding)}
    out = primitives.conv_general_dilated_p.bind(lhs, rhs, **params)
    around = [(0, 0, 0)] * out.ndim
    for i, (axis, count) in enumerate(zip(axes, places, strict=True)):
        around[numbers.out_spec[2 + i]] = (axis.places.start, count - axis.places.stop, 0)
    return lax.pad(out, jnp.zeros((), out.dtype), around)


trimmed_conv = Rewrite(
    name="trimmed_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="some taps or places see padding only",
)
