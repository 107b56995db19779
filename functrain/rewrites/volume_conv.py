"""3-D convolutions as 2-D ones, for which XLA has fast kernels on CPU.

In a layer, every tap of the kernel's first axis is a 2-D convolution of all planes of all volumes,
and the results are summed. In the gradient of the weights, where the kernel is larger than the
result, every position along the first axis is one, with the planes as channels.
`benchmarks/upstream/volume_conv.py` reproduces it.

Milliseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`); image
`[N, H, H, H, C]`, k x k x k kernel, O features, stride s:

    N H C k O s        forward, canonical -> planes  of the input       of the weights
    8 16 8 3 16 1      34/65 -> 4.1/8.8              108/137 -> 5.6/14  21/19 -> 3.8/4.0
    4 16 32 3 64 2     5.2/22 -> 1.7/3.3             840/860 -> 8.4/9   40/44 -> 3.3/4.4
    2 32 1 3 16 1      56/65 -> 16/10                170/212 -> 21/27   16/26 -> 4.2/4.9
    2 6 4 3 8 1        0.63/0.44 -> 0.07/0.14        0.75/0.53 -> 0.14/0.21
    1 4 4 3 4 1        0.15/0.12 -> 0.02/0.03        0.1/0.1 -> 0.02/0.02  0.17/0.19 -> 0.21/0.03

The sums are computed in another order, which changes the last bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from functrain.rewrites._conv import (
    canonical_rewrite,
    conv,
    dilated_size,
    output_sizes,
    pad_spatial,
    ungrouped_sizes,
)

# Each is a convolution in the program.
MAX_CONVOLUTIONS = 8
MIN_PRODUCTS = 2**16

_PARAMS_BY_AXIS = ("padding", "window_strides", "lhs_dilation", "rhs_dilation")


def _applies(eqn: JaxprEqn) -> bool:
    sizes = ungrouped_sizes(eqn)
    return (
        sizes is not None
        and len(sizes.image) == 3
        and min(sizes.window[0], sizes.positions[0]) <= MAX_CONVOLUTIONS
        and sizes.products >= MIN_PRODUCTS
    )


@canonical_rewrite(_applies, "2-D convolutions, summed, beat XLA's 3-D kernel")
def volume_conv(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Sums 2-D convolutions of planes, or makes one for each position."""
    dtype = params["preferred_element_type"] or lhs.dtype
    # The first spatial axis is padded and strided here, the other two by the 2-D convolutions.
    ends, stride, lhs_dilation, rhs_dilation = (params[name][0] for name in _PARAMS_BY_AXIS)
    params_2d = params | {name: params[name][1:] for name in _PARAMS_BY_AXIS}
    # The results are summed, so they are rounded only after that.
    params_2d |= {"preferred_element_type": jnp.promote_types(dtype, jnp.float32)}
    lhs = pad_spatial(lhs, [ends, (0, 0), (0, 0)], [lhs_dilation, 1, 1])
    taps = rhs.shape[0]
    (positions,) = output_sizes([lhs.shape[1]], [taps], [stride], [rhs_dilation])

    def slice_planes(start: int, count: int, step: int) -> jax.Array:
        return lax.slice_in_dim(lhs, start, start + dilated_size(count, step), step, axis=1)

    if taps <= positions:
        terms = []
        for tap in range(taps):
            planes = slice_planes(tap * rhs_dilation, positions, stride)
            terms.append(conv(lax.collapse(planes, 0, 2), rhs[tap], **params_2d))
        out = functools.reduce(lax.add, terms)  # [N P, *S', O]
        return out.reshape(-1, positions, *out.shape[1:])
    kernel = lax.collapse(jnp.moveaxis(rhs, 0, -3), rhs.ndim - 3, rhs.ndim - 1)  # [*W, T C, O]
    results = []
    for position in range(positions):
        planes = slice_planes(position * stride, taps, rhs_dilation)  # [N, T, *S, C]
        images = lax.collapse(jnp.moveaxis(planes, 1, -2), planes.ndim - 2)  # [N, *S, T C]
        results.append(conv(images, kernel, **params_2d))
    return jnp.stack(results, axis=1)
