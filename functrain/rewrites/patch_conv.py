"""Convolutions of a few small images as one matrix product of patches (im2col).

On CPU some of these run a hundred times slower than their arithmetic is worth: a cliff.

Milliseconds, 2 cores, jax 0.10, under `jit`; image `[N, H, H, C]`, 3 x 3 kernel, as many features:

    N H C          forward, canonical -> patches    of the input
    16 2 512       520 -> 3.2                       630 -> 3.8
    32 2 512       980 -> 7.8                       1000 -> 4.5
    16 2 256       43 -> 0.3                        32 -> 0.7
    16 4 512 / 2   3.9 -> 3.5                       550 -> 17        (stride 2)
    16 4 256       1.5 -> 1.8                       1.9 -> 1.8       (256 rows: a draw)
    64 4 64        0.35 -> 0.57                     0.43 -> 0.53     (so: not more rows)

Where the cliff begins was measured with 2 threads only.

Sums may be taken in another order: last bits change.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import from_canonical, to_canonical, ungrouped
from functrain.rewrites._frame import Rewrite
from functrain.rewrites._windows import padded, positions, window_at

# Each is a slice in the program. A gradient of weights has as many as the image has places.
MOST_TAPS = 25
# The rows of the product are the places of all images, its sum goes over taps and channels.
MOST_ROWS = 256
LEAST_SUMMED = 1024
LEAST_PRODUCTS = 2**22


def _applies(eqn: core.JaxprEqn) -> bool:
    shape = ungrouped(eqn)
    if shape is None:
        return False
    taps, places = math.prod(shape.window), math.prod(shape.places)
    rows, summed = shape.batch * places, taps * shape.channels
    if taps > MOST_TAPS or rows > MOST_ROWS:
        return False
    return summed >= LEAST_SUMMED and shape.products >= LEAST_PRODUCTS


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """A product for each tap, all in one operation; their sum in float32 at least.

    So the kernel stays as it is: `[W, I, O]`, or `[W, O, I]` in the gradient of the input, whose
    transpose would cost more than the product.
    """
    numbers, dtype = params["dimension_numbers"], params["preferred_element_type"] or lhs.dtype
    out_axis, in_axis, *spatial = numbers.rhs_spec
    kernel = lax.transpose(rhs, (*spatial, *sorted((in_axis, out_axis))))
    lhs, _ = to_canonical(lhs, rhs, numbers)
    lhs = padded(lhs, params["padding"], params["lhs_dilation"])
    window, strides, apart = kernel.shape[:-2], params["window_strides"], params["rhs_dilation"]
    places = positions(lhs.shape[1:-1], window, strides, apart)
    taps = itertools.product(*map(range, window))
    patches = jnp.stack([window_at(lhs, tap, apart, places, strides) for tap in taps])
    out = lax.dot_general(
        lax.collapse(patches, 1, lhs.ndim),  # [W, N S', I]
        lax.collapse(kernel, 0, lhs.ndim - 2),
        (((2,), (1 if in_axis < out_axis else 2,)), ((0,), (0,))),
        precision=params["precision"],
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    out = lax.convert_element_type(jnp.sum(out, axis=0), dtype)
    return from_canonical(out.reshape(lhs.shape[0], *places, -1), numbers)


patch_conv = Rewrite(
    name="patch_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="few small images: one matrix product of patches",
)
