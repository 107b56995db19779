"""Gradients of the weights of transposed convolutions, with image and kernel swapped.

They are convolutions of an image with holes (`lhs_dilation`) by a kernel that is larger than the
result, and XLA's CPU backend takes seconds for them. After the swap the holes are in the kernel, as
in the gradient of a strided convolution, and XLA's kernels skip those.
`benchmarks/upstream/swapped_conv.py` reproduces it.

Milliseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`); the layer's image
is `[N, H, H, C]`, its kernel k x k, its stride 2, its features O:

    N H C k O        canonical -> swapped
    64 7 128 4 128   1210/2440 -> 25/26
    16 16 64 4 32    370/380 -> 5.2/7.5
    16 4 256 4 128   180/200 -> 3.5/1.8
    16 8 32 3 16     2.2/3.6 -> 0.09/0.14
    8 4 8 3 8        0.08/0.04 -> 0.01/0.02
    4 32 16 4 1      1.0/1.1 -> 0.18/0.14
    4 16 1 4 16      0.23/0.23 -> 0.25/0.22

On a TPU v5e, XLA reverses the image in memory instead: by the estimate of its compiler, the step of
the DCGAN in `examples/dcgan.py` takes 1,192,675 cycles with the swap and 1,401,988 without.

The sums may be computed in another order, which changes the last bits.
"""

import math
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from functrain.rewrites._conv import (
    canonical_rewrite,
    conv,
    conv_positions,
    crop,
    dilated_size,
    ungrouped_sizes,
)


def _applies(eqn: JaxprEqn) -> bool:
    sizes, params = ungrouped_sizes(eqn), eqn.params
    return (
        sizes is not None
        and math.prod(params["lhs_dilation"]) > math.prod(params["rhs_dilation"])
        and math.prod(sizes.window) > math.prod(sizes.positions)
    )


@canonical_rewrite(
    _applies, "holes in the kernel cost less than holes in the image", platforms=("cpu", "tpu")
)
def swapped_conv(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Swaps image and kernel.

    Position p sees pixel i through tap w if ``low + i lhs_dilation = p stride + w rhs_dilation``.
    With p' counted from the end, that is ``low' + w rhs_dilation = p' stride + i lhs_dilation``:
    the kernel is the image, and the image is the kernel.
    """
    names = ("padding", "window_strides", "lhs_dilation", "rhs_dilation")
    spatial, window = lhs.shape[1:-1], rhs.shape[:-2]
    sizes = (spatial, window, conv_positions(spatial, window, params))
    padding = []
    for pixels, taps, positions, (low, _), stride, lhs_dilation, rhs_dilation in zip(
        *sizes, *map(params.__getitem__, names), strict=True
    ):
        excess = dilated_size(pixels, lhs_dilation) - dilated_size(taps, rhs_dilation)
        padding.append(((positions - 1) * stride - low, excess + low))
    params |= {
        "padding": tuple(padding),
        "lhs_dilation": params["rhs_dilation"],
        "rhs_dilation": params["lhs_dilation"],
        "precision": params["precision"] and params["precision"][::-1],
    }
    last = lhs.ndim - 1
    images = lax.transpose(rhs, (last, *range(last - 1), last - 1))  # [O, *W, C]
    kernels = lax.transpose(lhs, (*range(1, last), last, 0))  # [*S, C, N]
    images, params = crop(images, range(1, last), params)
    out = conv(images, kernels, **params)  # [O, *S', N], positions from the end
    out = lax.rev(out, tuple(range(1, last)))
    return lax.transpose(out, (last, *range(1, last), 0))
