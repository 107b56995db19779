"""Transposed convolutions as interleaved ordinary ones with parts of the kernel.

With d - 1 holes between the pixels of the image (`lhs_dilation` d), every d-th position of the
result sees the same taps: one in d along each axis. These positions, a phase, are an ordinary
convolution of the image without holes. All phases together multiply no zeros.

Milliseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`); a transposed layer
with stride 2, image `[N, H, H, C]`, k x k kernel, O features; then the gradient of the input of a
convolution with stride 2:

    N H C k O              forward, canonical -> phases
    64 14 128 4 128        86/89 -> 53/39
    16 16 64 4 32          2.6/2.0 -> 1.4/1.5
    8 28 64 4 128          49/42 -> 22/18
    16 4 256 4 128         2.0/1.9 -> 2.1/1.7
    64 7 128 4 128         13/13 -> 20/18
    8 4 8 3 8              0.02/0.03 -> 0.04/0.03     (hence: not the small ones)
    4 32 16 4 1            0.13/0.14 -> 0.27/0.28     (hence: not few channels)
    512 7 384 2 32         23/24 -> 147/131           (hence: more taps than phases)
    8 16 256 2 128         6.4/7.6 -> 11/9.4
    128 7 256 3 64         12/12 -> 22/22             (hence: not few features of many channels)
    16 28 512 3 32         22/24 -> 51/54
    8 16 256 4 128         13/13 -> 11/10
    64 4 256 5 64          91/90 -> 8.8/8.5           (but of kernels larger than the image)
    8 56 64 3 64, strided  13/11 -> 5.9/7.9
    64 14 64 3 128, same   2.8/2.5 -> 2.9/2.8

XLA multiplies every pixel by all taps, and adds up the products that belong to one position. That
is fast if each product sums many channels and there is little to add up. Of 349 layers drawn at
random, 108 are now left to XLA; in those the phases took 1.5 times as long in the median, and up to
7 times (AMD EPYC). Above 32 MiB the C library allocates new memory for the products each time.

The sums may be computed in another order, which changes the last bits.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import Sizes, conv, from_canonical, to_canonical, ungrouped_sizes
from functrain.rewrites._equations import avals
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._windows import dilated_size, output_sizes

# Each phase is a convolution in the program.
MAX_PHASES = 16
# Below these limits, interleaving the phases costs more than the saved products.
MIN_PRODUCTS = 2**28
MIN_CHANNELS = 16
# XLA is fast with so many channels, so few features, and so few bytes to add up.
MANY_CHANNELS, FEW_FEATURES, FEW_BYTES = 96, 64, 2**25


def _applies(eqn: core.JaxprEqn) -> bool:
    sizes, params = ungrouped_sizes(eqn), eqn.params
    phases = math.prod(params["lhs_dilation"])
    return (
        sizes is not None
        and 1 < phases <= MAX_PHASES
        and math.prod(params["rhs_dilation"]) == math.prod(params["window_strides"]) == 1
        and phases < math.prod(sizes.window) <= math.prod(sizes.positions)
        and min(sizes.channels, sizes.features) >= MIN_CHANNELS
        and sizes.products >= MIN_PRODUCTS
        and not _is_fast_in_xla(sizes, avals(eqn)[0].dtype.itemsize)
    )


def _is_fast_in_xla(sizes: Sizes, itemsize: int) -> bool:
    """Returns True if XLA adds up the products of pixels and taps of a 2-D image fast."""
    products_per_pixel = math.prod(sizes.window) * sizes.features
    pixels = sizes.batch * math.prod(sizes.image)
    return (
        len(sizes.window) == 2
        and sizes.channels >= MANY_CHANNELS
        and sizes.features <= FEW_FEATURES
        and all(map(operator.le, sizes.window, sizes.image))
        and pixels * products_per_pixel * itemsize < FEW_BYTES
    )


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    numbers, dilation = params["dimension_numbers"], params["lhs_dilation"]
    lhs, rhs = to_canonical(lhs, rhs, numbers)
    axes = list(map(_phases, lhs.shape[1:-1], rhs.shape[:-2], params["padding"], dilation))
    params |= {"lhs_dilation": (1,) * len(dilation)}
    results = [_convolve(lhs, rhs, phases, params) for phases in itertools.product(*axes)]
    positions = [sum(phase.positions for phase in phases) for phases in axes]
    return from_canonical(_interleave(results, dilation, positions), numbers)


class _Phase(NamedTuple):
    """The positions p, p + dilation, ... along an axis, for one p, as a separate convolution."""

    taps: slice
    padding: tuple[int, int]
    positions: int


def _phases(image: int, window: int, padding: tuple[int, int], dilation: int) -> list[_Phase]:
    """Returns the phases along an axis.

    Position t of phase p is position p + t dilation of the result. It sees pixel i through tap w if
    ``low + i dilation = p + t dilation + w``.
    """
    low, high = padding
    (positions,) = output_sizes([low + dilated_size(image, dilation) + high], [window], [1], [1])
    # All phases get the size of the longest, so that they can be stacked.
    longest = -(-positions // dilation)
    phases = []
    for p in range(dilation):
        first_tap = (low - p) % dilation
        before = (low - p - first_tap) // dilation
        taps = range(first_tap, window, dilation)
        after = longest + len(taps) - 1 - image - before
        count = len(range(p, positions, dilation))
        phases.append(_Phase(slice(first_tap, None, dilation), (before, after), count))
    return phases


def _convolve(
    lhs: jax.Array, rhs: jax.Array, phases: Sequence[_Phase], params: dict[str, Any]
) -> jax.Array:
    """Returns the results of one phase along each axis."""
    kernel = rhs[tuple(phase.taps for phase in phases)]
    params = params | {"padding": tuple(phase.padding for phase in phases)}
    if kernel.size:
        return conv(lhs, kernel, **params)
    # With fewer taps than `lhs_dilation`, these positions see only holes.
    image = [sum(pad) + size for pad, size in zip(params["padding"], lhs.shape[1:-1], strict=True)]
    shape = output_sizes(image, kernel.shape[:-2], params["window_strides"], params["rhs_dilation"])
    dtype = params["preferred_element_type"] or lhs.dtype
    return jnp.zeros((lhs.shape[0], *shape, rhs.shape[-1]), dtype)


def _interleave(
    results: Sequence[jax.Array], dilation: Sequence[int], positions: Sequence[int]
) -> jax.Array:
    """Puts the results of the phases of a transposed convolution in the order of their positions.

    Args:
      results: `[N, *T, O]` for each phase; those of the last axis vary fastest.
      dilation: `lhs_dilation`, which is the number of phases along each axis.
      positions: The sizes S' of the result.

    Returns:
      `[N, *S', O]`.
    """
    rank, (n, *phase_sizes, features) = len(dilation), results[0].shape
    out = jnp.stack(results).reshape(*dilation, *results[0].shape)
    pairs = itertools.chain(*((rank + 1 + axis, axis) for axis in range(rank)))
    out = out.transpose(rank, *pairs, 2 * rank + 1)
    out = out.reshape(n, *map(operator.mul, phase_sizes, dilation), features)
    # The phases were padded to the longest, so the end is cropped.
    return out[:, *map(slice, positions)]


phased_conv = Rewrite(
    name="phased_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="ordinary convolutions with parts of the kernel multiply no holes",
)
