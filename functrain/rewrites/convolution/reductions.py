"""Convolutions reduced to other convolutions, which are then computed by a plan of their own."""

import functools
import itertools
import math
import operator
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from functrain.rewrites._windows import pad_spatial
from functrain.rewrites.convolution._description import Convolution, dilated_size
from functrain.rewrites.convolution._method import Convolve, Method
from functrain.rewrites.convolution.depthwise import is_depthwise

# Each part is a convolution in the program.
MAX_PARTS = 16


def _moved(conv: Convolution) -> Mapping[str, float]:
    """Returns the features of a reduction that copies the operands, and then the result."""
    return {
        "calls": 1,
        "operands": conv.batch * math.prod(conv.image) * conv.channels * conv.groups
        + math.prod(conv.window) * conv.channels * conv.features,
        "results": conv.batch * math.prod(conv.positions) * conv.features,
    }


# --- Taps and positions that see only padding -------------------------------------------------
#
# If the kernel is larger than the image, such as a 3 x 3 kernel over the 1 x 1 image at the end of
# a deep network, some taps see only padding. In the gradient of the weights, some positions do, and
# their results are zeros. An infinite weight at such a tap no longer gives NaN.


def _trimmed_axes(conv: Convolution) -> list[tuple[range, range]]:
    """Returns the taps and the positions along each axis that see the image."""
    axes = []
    for size, taps, positions, (low, _), stride, image_dilation, window_dilation in zip(
        *(conv.image, conv.window, conv.positions, conv.padding),
        *(conv.strides, conv.image_dilation, conv.window_dilation),
        strict=True,
    ):
        size = dilated_size(size, image_dilation)
        axes.append(
            (
                _inside_image(taps, window_dilation, positions, stride, low, size),
                _inside_image(positions, stride, taps, window_dilation, low, size),
            )
        )
    return axes


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


def _trim(conv: Convolution) -> Convolution:
    axes = _trimmed_axes(conv)
    padding = []
    for i, (taps, positions) in enumerate(axes):
        # The padding that remains in front of the first tap at the first position, and the size
        # that the taps cover from the first position to the last. Both may crop the image.
        low = conv.padding[i][0]
        low -= taps.start * conv.window_dilation[i] + positions.start * conv.strides[i]
        covered = dilated_size(len(taps), conv.window_dilation[i])
        covered += (len(positions) - 1) * conv.strides[i]
        image = dilated_size(conv.image[i], conv.image_dilation[i])
        padding.append((low, covered - low - image))
    return conv._replace(window=tuple(len(taps) for taps, _ in axes), padding=tuple(padding))


def _is_trimmable(conv: Convolution) -> bool:
    axes = _trimmed_axes(conv)
    # At least one tap and position must remain, or the trimmed convolution would be empty.
    if not all(taps and positions for taps, positions in axes):
        return False
    lengths = [(len(taps), len(positions)) for taps, positions in axes]
    return lengths != list(zip(conv.window, conv.positions, strict=True))


def _lower_trimmed(
    conv: Convolution, lhs: jax.Array, rhs: jax.Array, convolve: Convolve
) -> jax.Array:
    axes = _trimmed_axes(conv)
    out = convolve(_trim(conv), lhs, rhs[tuple(slice(taps.start, taps.stop) for taps, _ in axes)])
    # The results of the positions that were removed are zeros.
    pads = [(0, 0, 0)]
    for (_, positions), count in zip(axes, conv.positions, strict=True):
        pads.append((positions.start, count - positions.stop, 0))
    return lax.pad(out, jnp.zeros((), out.dtype), [*pads, (0, 0, 0)])


trimmed = Method("trimmed", _is_trimmable, _moved, _lower_trimmed, lambda conv: [(_trim(conv), 1)])


# --- Image and kernel swapped -----------------------------------------------------------------
#
# Gradients of the weights of transposed convolutions are convolutions of an image with holes by a
# kernel that is larger than the result. After the swap the holes are in the kernel, as in the
# gradient of a strided convolution.


def _swap(conv: Convolution) -> Convolution:
    """Returns the convolution of the kernel by the image.

    Position p sees pixel i through tap w if ``low + i lhs_dilation = p stride + w rhs_dilation``.
    With p' counted from the end, that is ``low' + w rhs_dilation = p' stride + i lhs_dilation``:
    the kernel is the image, and the image is the kernel.
    """
    padding = []
    for i, (low, _) in enumerate(conv.padding):
        image = dilated_size(conv.image[i], conv.image_dilation[i])
        kernel = dilated_size(conv.window[i], conv.window_dilation[i])
        last_position = (conv.positions[i] - 1) * conv.strides[i]
        swapped_low = last_position - low
        padding.append((swapped_low, last_position + image - kernel - swapped_low))
    return conv._replace(
        batch=conv.features,
        image=conv.window,
        window=conv.image,
        features=conv.batch,
        padding=tuple(padding),
        image_dilation=conv.window_dilation,
        window_dilation=conv.image_dilation,
        precision=conv.precision and conv.precision[::-1],
    )


def _is_swappable(conv: Convolution) -> bool:
    return (
        not conv.is_grouped
        and math.prod(conv.image_dilation) > math.prod(conv.window_dilation)
        and math.prod(conv.window) > math.prod(conv.positions)
    )


def _lower_swapped(
    conv: Convolution, lhs: jax.Array, rhs: jax.Array, convolve: Convolve
) -> jax.Array:
    last = lhs.ndim - 1
    images = lax.transpose(rhs, (last, *range(last - 1), last - 1))  # [O, *W, I]
    kernels = lax.transpose(lhs, (*range(1, last), last, 0))  # [*S, I, N]
    out = convolve(_swap(conv), images, kernels)  # [O, *P, N], positions from the end
    out = lax.rev(out, tuple(range(1, last)))
    return lax.transpose(out, (last, *range(1, last), 0))


swapped = Method("swapped", _is_swappable, _moved, _lower_swapped, lambda conv: [(_swap(conv), 1)])


# --- Phases of transposed convolutions --------------------------------------------------------
#
# With d - 1 holes between the pixels of the image, every d-th position of the result sees the same
# taps: one in d along each axis. These positions, a phase, are an ordinary convolution of the image
# without holes. All phases together multiply no zeros.


class _Phase(NamedTuple):
    """The positions p, p + dilation, ... along an axis, for one p, as a separate convolution."""

    taps: range
    padding: tuple[int, int]
    positions: int


def _phases(conv: Convolution, axis: int) -> list[_Phase]:
    """Returns the phases along an axis.

    Position t of phase p is position p + t dilation of the result. It sees pixel i through tap w if
    ``low + i dilation = p + t dilation + w``.
    """
    low, dilation, positions = (
        conv.padding[axis][0],
        conv.image_dilation[axis],
        conv.positions[axis],
    )
    # All phases get the size of the longest, so that they can be stacked.
    longest = -(-positions // dilation)
    phases = []
    for p in range(dilation):
        taps = range((low - p) % dilation, conv.window[axis], dilation)
        before = (low - p - taps.start) // dilation
        after = longest + len(taps) - 1 - conv.image[axis] - before
        phases.append(_Phase(taps, (before, after), len(range(p, positions, dilation))))
    return phases


def _all_phases(conv: Convolution) -> list[tuple[_Phase, ...]]:
    return list(itertools.product(*(_phases(conv, axis) for axis in range(len(conv.image)))))


def _phase_conv(conv: Convolution, phases: tuple[_Phase, ...]) -> Convolution:
    return conv._replace(
        window=tuple(len(phase.taps) for phase in phases),
        padding=tuple(phase.padding for phase in phases),
        image_dilation=(1,) * len(phases),
        is_kernel_transposed=False,
    )


def _has_phases(conv: Convolution) -> bool:
    return (
        not conv.is_grouped
        and 1 < math.prod(conv.image_dilation) <= MAX_PARTS
        and math.prod(conv.window_dilation) == math.prod(conv.strides) == 1
        and math.prod(conv.positions) > 1
    )


def _lower_phases(
    conv: Convolution, lhs: jax.Array, rhs: jax.Array, convolve: Convolve
) -> jax.Array:
    results = []
    for phases in _all_phases(conv):
        part = _phase_conv(conv, phases)
        kernel = rhs[tuple(slice(p.taps.start, None, p.taps.step) for p in phases)]
        if kernel.size:
            results.append(convolve(part, lhs, kernel))
        else:
            # With fewer taps than `image_dilation`, these positions see only holes.
            shape = (conv.batch, *map(_longest, conv.positions, conv.image_dilation), conv.features)
            results.append(jnp.zeros(shape, conv.out_dtype))
    rank, (_, *sizes, _) = len(conv.image), results[0].shape
    out = jnp.stack(results).reshape(*conv.image_dilation, *results[0].shape)
    pairs = itertools.chain(*((rank + 1 + axis, axis) for axis in range(rank)))
    out = out.transpose(rank, *pairs, 2 * rank + 1)
    shape = map(operator.mul, sizes, conv.image_dilation)
    out = out.reshape(conv.batch, *shape, conv.features)
    # The phases were padded to the longest, so the end is cropped.
    return out[:, *map(slice, conv.positions)]


def _longest(positions: int, dilation: int) -> int:
    return -(-positions // dilation)


def _phase_parts(conv: Convolution) -> list[tuple[Convolution, int]]:
    parts = [_phase_conv(conv, phases) for phases in _all_phases(conv)]
    return [(part, 1) for part in parts if math.prod(part.window)]


phases = Method("phases", _has_phases, _moved, _lower_phases, _phase_parts)


# --- The first axis of three, apart -----------------------------------------------------------
#
# In a layer, every tap of the kernel's first axis is a 2-D convolution of all planes of all
# volumes, and the results are summed. In the gradient of the weights, where the kernel is larger
# than the result, every position along the first axis is one, with the planes as channels.


def _sums_taps(conv: Convolution) -> bool:
    return conv.window[0] <= conv.positions[0]


def _plane_conv(conv: Convolution) -> Convolution:
    names = ("image", "window", "padding", "strides", "image_dilation", "window_dilation")
    part = conv._replace(**{name: getattr(conv, name)[1:] for name in names})
    if _sums_taps(conv):
        # The results are summed, so they are rounded only after that.
        return part._replace(batch=conv.batch * conv.positions[0], out_dtype=conv.sum_dtype)
    return part._replace(channels=conv.channels * conv.window[0], out_dtype=conv.sum_dtype)


def _lower_planes(
    conv: Convolution, lhs: jax.Array, rhs: jax.Array, convolve: Convolve
) -> jax.Array:
    rank = len(conv.image)
    padding, holes = [(0, 0)] * rank, [1] * rank
    padding[0], holes[0] = conv.padding[0], conv.image_dilation[0]
    lhs, part = pad_spatial(lhs, padding, holes), _plane_conv(conv)
    stride, dilation = conv.strides[0], conv.window_dilation[0]

    def slice_planes(start: int, count: int, step: int) -> jax.Array:
        return lax.slice_in_dim(lhs, start, start + dilated_size(count, step), step, axis=1)

    if _sums_taps(conv):
        terms = []
        for tap in range(conv.window[0]):
            planes = slice_planes(tap * dilation, conv.positions[0], stride)
            terms.append(convolve(part, lax.collapse(planes, 0, 2), rhs[tap]))
        out = functools.reduce(lax.add, terms)  # [N P, *P', O]
        out = out.reshape(conv.batch, conv.positions[0], *out.shape[1:])
    else:
        kernel = lax.collapse(jnp.moveaxis(rhs, 0, -3), rhs.ndim - 3, rhs.ndim - 1)  # [*W, T I, O]
        results = []
        for position in range(conv.positions[0]):
            planes = slice_planes(position * stride, conv.window[0], dilation)
            planes = lax.collapse(jnp.moveaxis(planes, 1, -2), planes.ndim - 2)  # [N, *S, T I]
            results.append(convolve(part, planes, kernel))
        out = jnp.stack(results, axis=1)
    return lax.convert_element_type(out, conv.out_dtype)


def _plane_features(conv: Convolution) -> Mapping[str, float]:
    count = min(conv.window[0], conv.positions[0])
    return {name: value * count for name, value in _moved(conv).items()}


planes = Method(
    "planes",
    lambda conv: (
        not conv.is_grouped
        and len(conv.image) > 2
        and min(conv.window[0], conv.positions[0]) <= MAX_PARTS
    ),
    _plane_features,
    _lower_planes,
    lambda conv: [(_plane_conv(conv), min(conv.window[0], conv.positions[0]))],
)


# --- Groups, one after the other --------------------------------------------------------------


def _group_conv(conv: Convolution) -> Convolution:
    count = conv.groups * conv.batch_groups
    return conv._replace(
        batch=conv.batch // conv.batch_groups,
        features=conv.features // count,
        groups=1,
        batch_groups=1,
    )


def _lower_groups(
    conv: Convolution, lhs: jax.Array, rhs: jax.Array, convolve: Convolve
) -> jax.Array:
    count, part = conv.groups * conv.batch_groups, _group_conv(conv)
    lhs_axis = lhs.ndim - 1 if conv.groups > 1 else 0

    def convolve_group(
        carry: tuple[()], group: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[()], jax.Array]:
        return carry, convolve(part, *group)

    # Unrolled, each group would take 10 ms more to compile, and the program would run no faster.
    xs = _move_groups_first(lhs, lhs_axis, count), _move_groups_first(rhs, rhs.ndim - 1, count)
    _, out = lax.scan(convolve_group, (), xs)  # [G, N, *P, O]
    out = lax.transpose(out, (*range(1, out.ndim - 1), 0, out.ndim - 1))
    return lax.collapse(out, out.ndim - 2)


def _move_groups_first(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Splits an axis into groups, and moves the axis of the groups to the front."""
    shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    other_axes = (*range(axis), *range(axis + 1, len(shape)))
    return lax.transpose(lax.reshape(x, shape), (axis, *other_axes))


groups = Method(
    "groups",
    lambda conv: conv.is_grouped and not is_depthwise(conv),
    lambda conv: {
        name: v * conv.groups * conv.batch_groups if name == "calls" else v
        for name, v in _moved(conv).items()
    },
    _lower_groups,
    lambda conv: [(_group_conv(conv), conv.groups * conv.batch_groups)],
)
