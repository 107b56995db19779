"""Transposed convolutions as ordinary ones with parts of the kernel, interleaved.

With `holes` between the pixels of the image (`lhs_dilation`), every holes-th place of the result
sees the same taps, one in `holes` along each axis. The places that do, a phase, are an ordinary
convolution of the image without holes, and all phases together multiply no zeros.

Milliseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`); a transposed layer
with stride 2, image `[N, H, H, C]`, k x k kernel, O features; then the gradient of the input of a
convolution with stride 2:

    N H C k O              forward, canonical -> phases
    64 14 128 4 128        86/89 -> 53/39
    16 16 64 4 32          2.6/2.0 -> 1.4/1.5
    8 28 64 4 128          49/42 -> 22/18
    16 4 256 4 128         2.0/1.9 -> 2.1/1.7
    64 7 128 4 128         13/13 -> 20/18
    8 4 8 3 8              0.02/0.03 -> 0.04/0.03     (so: not the small ones)
    4 32 16 4 1            0.13/0.14 -> 0.27/0.28     (so: not few channels)
    512 7 384 2 32         23/24 -> 147/131           (so: more taps than phases)
    8 16 256 2 128         6.4/7.6 -> 11/9.4
    128 7 256 3 64         12/12 -> 22/22             (so: not few features of many channels)
    16 28 512 3 32         22/24 -> 51/54
    8 16 256 4 128         13/13 -> 11/10
    64 4 256 5 64          91/90 -> 8.8/8.5           (but of kernels larger than the image)
    8 56 64 3 64, strided  13/11 -> 5.9/7.9
    64 14 64 3 128, same   2.8/2.5 -> 2.9/2.8

XLA itself multiplies every pixel with all taps and adds up what lands on one place. That is fast
if there is much to sum before, and little to add up: of 349 layers drawn at random the phases took
1.5 times as long in the 108 that are now left to XLA, by the median, and up to 7 times (AMD EPYC).
Above 32 MiB the C library takes new memory for it each time.

Sums may be taken in another order: last bits change.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import (
    Sizes,
    avals,
    conv,
    from_canonical,
    to_canonical,
    ungrouped_sizes,
)
from functrain.rewrites._frame import Rewrite
from functrain.rewrites._windows import dilated_size, output_sizes

# Each phase is a convolution in the program.
MAX_PHASES = 16
# What it takes for the products saved to weigh more than laying the phases side by side.
MIN_PRODUCTS = 2**28
MIN_CHANNELS = 16
# What is fast in XLA: so many channels, so few features, and so few bytes to add up.
MANY_CHANNELS, FEW_FEATURES, FEW_BYTES = 96, 64, 2**25


def _applies(eqn: core.JaxprEqn) -> bool:
    shape, params = ungrouped_sizes(eqn), eqn.params
    phases = math.prod(params["lhs_dilation"])
    return (
        shape is not None
        and 1 < phases <= MAX_PHASES
        and math.prod(params["rhs_dilation"]) == math.prod(params["window_strides"]) == 1
        and phases < math.prod(shape.window) <= math.prod(shape.positions)
        and min(shape.channels, shape.features) >= MIN_CHANNELS
        and shape.products >= MIN_PRODUCTS
        and not _is_fast(shape, avals(eqn)[0].dtype.itemsize)
    )


def _is_fast(shape: Sizes, itemsize: int) -> bool:
    """Whether XLA is fast in adding up what the taps make of every pixel of a 2-D image."""
    taps = math.prod(shape.window) * shape.features
    return (
        len(shape.window) == 2
        and shape.channels >= MANY_CHANNELS
        and shape.features <= FEW_FEATURES
        and all(size <= image for size, image in zip(shape.window, shape.image, strict=True))
        and shape.batch * math.prod(shape.image) * taps * itemsize < FEW_BYTES
    )


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    numbers, holes = params["dimension_numbers"], params["lhs_dilation"]
    lhs, rhs = to_canonical(lhs, rhs, numbers)
    sizes = zip(lhs.shape[1:-1], rhs.shape[:-2], params["padding"], holes, strict=True)
    axes = [_phases(*axis) for axis in sizes]
    params |= {"lhs_dilation": (1,) * len(holes)}
    parts = [_part(lhs, rhs, phase, params) for phase in itertools.product(*axes)]
    places = [sum(phase.places for phase in phases) for phases in axes]
    return from_canonical(_interleaved(parts, holes, places), numbers)


class _Phase(NamedTuple):
    """The places p, p + holes, ... along an axis, as a convolution of their own."""

    taps: slice
    padding: tuple[int, int]
    places: int


def _phases(image: int, window: int, padding: tuple[int, int], holes: int) -> list[_Phase]:
    """Place p + t holes sees pixel i through tap w where low + i holes = p + t holes + w."""
    low, high = padding
    (places,) = output_sizes([low + dilated_size(image, holes) + high], [window], [1], [1])
    longest = -(-places // holes)  # all phases as long: they are stacked
    phases = []
    for p in range(holes):
        first = (low - p) % holes
        before, taps = (low - p - first) // holes, range(first, window, holes)
        after = longest + len(taps) - 1 - image - before
        phases.append(
            _Phase(slice(first, None, holes), (before, after), len(range(p, places, holes)))
        )
    return phases


def _part(
    lhs: jax.Array, rhs: jax.Array, phases: Sequence[_Phase], params: dict[str, Any]
) -> jax.Array:
    part = rhs[tuple(phase.taps for phase in phases)]
    params = params | {"padding": tuple(phase.padding for phase in phases)}
    if part.size:
        return conv(lhs, part, **params)
    # Fewer taps than holes: these places see nothing.
    image = [sum(pad) + size for pad, size in zip(params["padding"], lhs.shape[1:-1], strict=True)]
    shape = output_sizes(image, part.shape[:-2], params["window_strides"], params["rhs_dilation"])
    dtype = params["preferred_element_type"] or lhs.dtype
    return jnp.zeros((lhs.shape[0], *shape, rhs.shape[-1]), dtype)


def _interleaved(
    parts: Sequence[jax.Array], holes: Sequence[int], places: Sequence[int]
) -> jax.Array:
    """Lays phases `[N, *T, O]` side by side, the last axis' first: `[N, *S', O]`."""
    rank, (n, *each, features) = len(holes), parts[0].shape
    out = jnp.stack(parts).reshape(*holes, *parts[0].shape)
    pairs = itertools.chain(*((rank + 1 + axis, axis) for axis in range(rank)))
    out = out.transpose(rank, *pairs, 2 * rank + 1)
    out = out.reshape(n, *(t * h for t, h in zip(each, holes, strict=True)), features)
    return out[:, *(slice(size) for size in places)]


phased_conv = Rewrite(
    name="phased_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="ordinary convolutions with parts of the kernel multiply no holes",
)
