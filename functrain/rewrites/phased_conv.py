"""Transposed convolutions as interleaved ordinary ones with parts of the kernel.

With d - 1 holes between the pixels of the image (`lhs_dilation` d), every d-th position of the
result sees the same taps: one in d along each axis. These positions, a phase, are an ordinary
convolution of the image without holes. All phases together multiply no zeros. XLA's CPU backend
multiplies the zeros (https://github.com/jax-ml/jax/issues/23783, open;
`benchmarks/upstream/phased_conv.py` reproduces it).

Milliseconds in a loop, two cores of an AMD EPYC, jax 0.12; a transposed layer with stride 2, image
`[N, H, H, C]`, k x k kernel, O features; then the gradient of the input of a convolution with
stride 2:

    N H C k O                canonical -> phases
    8 28 64 4 128            46 -> 12
    64 4 64 5 64             41 -> 1.9
    16 28 128 3 32           8.4 -> 6.8
    64 7 128 4 128           12.3 -> 11.4
    32 7 256 3 64            2.6 -> 3.1
    4 32 16 4 1              0.18 -> 0.35      (hence: not few features)
    64 7 384 2 32            1.7 -> 2.6        (hence: more taps than phases)
    8 56 64 3 64, strided    5.6 -> 4.1
    8 8 16 5 32, strided     0.88 -> 0.08
    64 28 3 3 64, strided    0.75 -> 0.97      (three features)

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

from functrain.rewrites._conv import conv, from_canonical, to_canonical, ungrouped_sizes
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._windows import dilated_size, output_sizes

# Each phase is a convolution in the program.
MAX_PHASES = 16
# With fewer features, interleaving the phases costs more than the saved products.
MIN_FEATURES = 8


def _applies(eqn: core.JaxprEqn) -> bool:
    sizes, params = ungrouped_sizes(eqn), eqn.params
    phases = math.prod(params["lhs_dilation"])
    return (
        sizes is not None
        and 1 < phases <= MAX_PHASES
        and math.prod(params["rhs_dilation"]) == math.prod(params["window_strides"]) == 1
        and phases < math.prod(sizes.window) <= math.prod(sizes.positions)
        and sizes.features >= MIN_FEATURES
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
