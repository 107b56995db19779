"""Convolutions with one tap or one position as a matrix product.

These are 1 x 1 convolutions, the gradients of both their operands, and kernels that cover their
padded image. XLA's CPU backend is slower for them than for the product, which
`benchmarks/upstream/dot_conv.py` reproduces.

Milliseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`); image `[N, H, H, C]`,
k x k kernel, O features, stride s:

    N H C k O s        forward, canonical -> dot  of the input            of the weights
    16 8 256 1 64 1    0.17/0.33 -> 0.17/0.28     0.17/0.21 -> 0.16/0.19  0.74/1.0 -> 0.35/0.55
    16 1 2048 1 512 1  0.75/1.3 -> 0.49/0.68      1.4/4.2 -> 0.45/2.6     0.51/0.66 -> 0.3/0.2
    16 2 512 1 2048 1  1.2/1.9 -> 0.89/1.4        1.6/2.3 -> 1.2/1.5      2.6/2.4 -> 0.58/0.68
    8 56 64 1 256 1    12/14 -> 8.6/13            13/31 -> 3.3/13         76/84 -> 6.7/11
    16 16 256 1 512 2  1.5/4.6 -> 2.1/4.0         2.9/1.7 -> 1.6/1.4      6.5/8.3 -> 1.8/3.1
    16 16 16 1 96 1    0.12/0.23 -> 0.18/0.21     0.13/0.57 -> 0.11/0.21  0.43/0.56 -> 0.2/0.2
    2 4 8 1 16 1       0.02/0.02 -> 0.01/0.02     0.01/0.02 -> 0.01/0.02  0.02/0.02 -> 0.01/0.02
    16 1 512 3 512 1   6.6/27 -> 0.12/11          13/32 -> 0.12/5.7       1.4/1.1 -> 0.20/0.21

On jax 0.12, in a loop, a 1 x 1 convolution of 16 images of 16x16x4 to 64 features takes 0.13 ms and
a product 0.25, the gradient of its input 0.10 and 0.27. So narrow ones stay convolutions. The
gradients of weights do not: for 8 images of 4x4x512, which a kernel covers, and 64 features, the
convolution takes 0.60 ms and the product 0.19 (on a busy machine).

One tap with a stride stays a convolution: XLA may compile a network that only predicts into one
operation, which slices would break up. The residual net of the benchmark, which has two such
convolutions, predicted a batch in 27 ms with slices and in 21.9 without, and trained equally fast
(1.01; ResNet50 0.99).

The sums may be computed in another order, which changes the last bits.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, primitives

from functrain.rewrites._conv import from_canonical, is_weight_gradient, ungrouped_sizes
from functrain.rewrites._rewrite import rewrite

# A product with so few channels, or so few features, takes longer than XLA's kernel.
NARROW = 8


def _applies(eqn: JaxprEqn) -> bool:
    sizes, params = ungrouped_sizes(eqn), eqn.params
    if sizes is None:
        return False
    if math.prod(sizes.positions) == 1 and math.prod(params["lhs_dilation"]) == 1:
        return True
    if math.prod(sizes.window) > 1 or math.prod(params["window_strides"]) > 1:
        return False
    return min(sizes.channels, sizes.features) > NARROW or is_weight_gradient(params)


@rewrite(primitives.conv_general_dilated_p, _applies, "one tap or one position: a matrix product")
def dot_conv(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Contracts the operands without transposing them, then transposes the result to its layout."""
    numbers = params["dimension_numbers"]
    window = [rhs.shape[axis] for axis in numbers.rhs_spec[2:]]
    if math.prod(window) > 1:  # one position
        lhs = _pad_and_stride(lhs, numbers.lhs_spec, params, params["rhs_dilation"])
        for axis, taps in zip(numbers.lhs_spec[2:], window, strict=True):
            lhs = lax.slice_in_dim(lhs, 0, taps, axis=axis)
        out = _dot(lhs, rhs, numbers.lhs_spec[1:], numbers.rhs_spec[1:], params)
        out = jnp.expand_dims(out, range(1, lhs.ndim - 1))
    elif math.prod(params["lhs_dilation"]) == 1:
        lhs = _pad_and_stride(lhs, numbers.lhs_spec, params, params["window_strides"])
        out = _multiply_one_tap(lhs, rhs, params)
    else:
        # The zeros between the pixels need no products, so they are inserted afterwards.
        out = _multiply_one_tap(lhs, rhs, params)
        spec = (0, out.ndim - 1, *range(1, out.ndim - 1))
        out = _pad_and_stride(out, spec, params, params["window_strides"])
    return from_canonical(out, numbers)


def _multiply_one_tap(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Multiplies each pixel by a kernel of one tap; returns `[N, *S, O]`."""
    numbers = params["dimension_numbers"]
    batch, feature, *spatial = numbers.lhs_spec
    out = _dot(lhs, rhs, [feature], numbers.rhs_spec[1:], params)
    # The product has the other axes of lhs in their order, then the features.
    axes = [axis for axis in range(lhs.ndim) if axis != feature]
    return lax.transpose(out, [*map(axes.index, (batch, *spatial)), out.ndim - 1])


def _dot(
    lhs: jax.Array, rhs: jax.Array, lhs_axes: Sequence[int], rhs_axes: Sequence[int], params: Any
) -> jax.Array:
    """Contracts axes of both operands, in the order that lhs has them in memory."""
    # A single tap: the spatial axes of rhs have size 1.
    if len(lhs_axes) < len(rhs_axes):
        rhs = lax.squeeze(rhs, rhs_axes[1:])
        rhs_axes = [rhs_axes[0] - sum(axis < rhs_axes[0] for axis in rhs_axes[1:])]
    pairs = sorted(zip(lhs_axes, rhs_axes, strict=True))
    lhs_axes, rhs_axes = zip(*pairs, strict=True)
    options = {name: params[name] for name in ("precision", "preferred_element_type")}
    return lax.dot_general(lhs, rhs, ((lhs_axes, rhs_axes), ((), ())), **options)


def _pad_and_stride(
    x: jax.Array, spec: Sequence[int], params: dict[str, Any], strides: Sequence[int]
) -> jax.Array:
    """Pads and dilates the spatial axes, and then selects elements with the given strides."""
    pads, steps = [(0, 0, 0)] * x.ndim, [1] * x.ndim
    spatial = zip(spec[2:], params["padding"], params["lhs_dilation"], strides, strict=True)
    for axis, (low, high), dilation, stride in spatial:
        pads[axis], steps[axis] = (low, high, dilation - 1), stride
    x = lax.pad(x, jnp.zeros((), x.dtype), pads)
    return lax.slice(x, [0] * x.ndim, x.shape, steps)
