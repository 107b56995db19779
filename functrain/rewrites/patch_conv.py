"""Convolutions that XLA's CPU backend computes slowly, as one matrix product of all taps.

There are two ways to do that:

- Patches: what the taps see at a position (im2col, `[W C]`) is multiplied by the kernel.
- Shifts: each pixel is multiplied by all taps (`[W O]`), and the products are shifted and added up.

They are used for

- a kernel larger than the image, which XLA computes in a naive kernel, up to a hundred times slower
  than the arithmetic requires. A kernel larger than the result is treated alike: the image may have
  been padded by an operation of its own, which XLA makes a part of the convolution. If the kernel
  is transposed, as in the gradient of a layer's input, and there are no more pixels than positions,
  shifts are used.
- a transposed kernel, if there are no more pixels in the batch than channels: shifts do not
  transpose it.

`benchmarks/upstream/patch_conv.py` reproduces the first of them.

Milliseconds in a loop, two cores of an AMD EPYC, jax 0.12; image `[N, H, H, C]`, k x k kernel, O
features:

    N H C k O                 forward, XLA -> product     of the input
    64 2 128 3 128            9.5 -> 0.57                 10.3 -> 0.60
    16 2 256 3 256            20 -> 0.56                  21 -> 0.61
    64 3 64 5 64              13 -> 0.95                  13 -> 0.96
    128 4 64 5 64             58 -> 3.3                   58 -> 3.3
    64 4 256 3 256, VALID     2.4 -> 1.8                  157 -> 2.5
    16 4 512 3 512            (kept)                      12 -> 7.6
    4 7 512 3 512             (kept)                      12 -> 6.9
    64 3 64 3 64              (kept: 0.30, with a product 0.32)

The sums may be computed in another order, which changes the last bits.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from functrain.rewrites._conv import (
    Sizes,
    canonical_rewrite,
    conv_positions,
    is_weight_gradient,
    output_sizes,
    pad_spatial,
    strided_window,
    ungrouped_sizes,
)
from functrain.rewrites._equations import is_sharded

# Each tap is a slice in the program.
MAX_TAPS = 64
# The most bytes of patches, or of products to be shifted, that are made at a time.
MAX_BYTES = 2**26


def _applies(eqn: JaxprEqn) -> bool:
    sizes = ungrouped_sizes(eqn)
    return sizes is not None and _method(sizes, eqn.params) is not None


def _method(sizes: Sizes, params: dict[str, Any]) -> Callable[..., jax.Array] | None:
    """Returns the way to compute a convolution, or None if XLA's kernel is faster."""
    # Patches would contain the holes.
    if is_weight_gradient(params) or math.prod(params["lhs_dilation"]) > 1:
        return None
    if not 1 < math.prod(sizes.window) <= MAX_TAPS:
        return None
    if not _is_kernel_large(sizes, params):
        return None
    return _sum_of_shifts if _avoids_transpose(sizes, params) else _product_of_patches


def _is_kernel_large(sizes: Sizes, params: dict[str, Any]) -> bool:
    """Returns True if there are more taps than pixels, or a large kernel would be transposed."""
    pixels = math.prod(sizes.image)
    # The image may be padded by the operation before, which XLA makes a part of the convolution.
    unpadded = math.prod(map(operator.mul, sizes.positions, params["window_strides"]))
    if math.prod(sizes.window) > min(pixels, unpadded):
        return True
    return sizes.batch * pixels <= sizes.channels and _avoids_transpose(sizes, params)


def _avoids_transpose(sizes: Sizes, params: dict[str, Any]) -> bool:
    """Returns True if shifts transpose no kernel, and multiply no more than patches would."""
    # In the gradient of a layer's input, the kernel is `[O, I]` at each tap.
    out_axis, in_axis, *_ = params["dimension_numbers"].rhs_spec
    return bool(out_axis < in_axis) and math.prod(sizes.image) <= math.prod(sizes.positions)


@canonical_rewrite(_applies, "one matrix product for all taps is faster than XLA's kernel")
def patch_conv(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Multiplies the views of all taps, or shifts the products of all taps."""
    dtype = params["preferred_element_type"] or lhs.dtype
    *window, channels, features = rhs.shape
    pixels = lhs.shape[1:-1]
    positions = tuple(conv_positions(pixels, window, params))
    sizes = Sizes(len(lhs), pixels, channels, tuple(window), features, positions)
    # Benchmarks also replace convolutions to which the rewrite does not apply, by patches.
    method = _method(sizes, params) or _product_of_patches
    product = functools.partial(
        lax.dot_general,
        precision=params["precision"],
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    return method(product, lhs, rhs, params)


def _product_of_patches(product: Any, x: jax.Array, kernel: jax.Array, params: Any) -> jax.Array:
    """Multiplies patches `[N S', W I]` by the kernel `[W I, O]`, for some images at a time.

    A patch consists of the views of all taps, side by side.
    """
    weights = lax.collapse(kernel, 0, -1)

    def convolve(x: jax.Array) -> jax.Array:
        patches = lax.concatenate(_tap_views(x, kernel.shape[:-2], params), x.ndim - 1)
        rows = lax.collapse(patches, 0, -1)
        out: jax.Array = product(rows, weights, (((1,), (0,)), ((), ())))
        return out.reshape(*patches.shape[:-1], -1)

    positions = math.prod(conv_positions(x.shape[1:-1], kernel.shape[:-2], params))
    max_images = max(1, MAX_BYTES // (positions * len(weights) * x.dtype.itemsize))
    # A loop over the images of a sharded batch would move them between devices.
    if len(x) <= max_images or is_sharded(jax.typeof(x)):
        return convolve(x)
    out: jax.Array = lax.map(lambda image: convolve(image[None])[0], x, batch_size=max_images)
    return out


def _sum_of_shifts(product: Any, x: jax.Array, kernel: jax.Array, params: Any) -> jax.Array:
    """Multiplies pixels `[N S, I]` by all taps `[W O, I]`, then shifts and adds the products."""
    rows, weights = lax.collapse(x, 0, -1), lax.collapse(jnp.swapaxes(kernel, -2, -1), 0, -1)
    products = product(rows, weights, (((1,), (1,)), ((), ()))).reshape(*x.shape[:-1], -1)
    features = kernel.shape[-1]
    terms = []
    # Of each shifted array only the features of its own tap are used.
    for tap, view in enumerate(_tap_views(products, kernel.shape[:-2], params)):
        terms.append(lax.slice_in_dim(view, tap * features, (tap + 1) * features, axis=-1))
    return functools.reduce(operator.add, terms)


def _tap_views(x: jax.Array, window: Sequence[int], params: dict[str, Any]) -> list[jax.Array]:
    """Returns what each tap sees at each position: `[N, *S', C]`."""
    strides, dilation = params["window_strides"], params["rhs_dilation"]
    x = pad_spatial(x, params["padding"], params["lhs_dilation"])
    sizes = output_sizes(x.shape[1:-1], window, strides, dilation)
    taps = itertools.product(*map(range, window))
    return [strided_window(x, tap, dilation, sizes, strides) for tap in taps]
