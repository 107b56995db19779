"""Convolutions of small images as one matrix product: of patches (im2col), or of the image.

The patches, which hold what all taps see, are multiplied by the kernel at once. In the gradient of
the input, the kernel must be transposed for that. If the kernel is larger than the image, the
products of each pixel with all taps are computed at once instead, and then shifted and added up.

If the kernel is larger than the image, XLA's CPU backend is up to a hundred times slower than the
arithmetic requires, and some twenty times for few channels. In other cases a product is faster if
it has no more rows than channels and features. Patches of an image with holes would contain the
holes: such convolutions are left to `phased_conv`, unless they are computed by shifts.

Milliseconds, 2 cores of an AMD EPYC, jax 0.10, alone under `jit` and in a loop (`jit/loop`); image
`[N, H, H, C]`, k x k kernel, as many features; without this rule, others apply:

    N H C k          forward: without -> with     of the input: without -> with
    256 2 512 3      2196/2158 -> 38/27           2233/2150 -> 51/31
    256 2 256 3      160/164 -> 8.1/5.8           168/167 -> 7.2/6.0
    64 2 128 3       1.6/1.1 -> 0.9/0.8           1.5/1.0 -> 1.3/0.9
    256 2 64 3       10/5.1 -> 0.7/0.6            5.5/5.3 -> 0.7/0.5
    1024 2 32 3      6.7/7.0 -> 1.3/0.6           7.4/7.1 -> 0.7/1.0
    256 2 16 3       0.37/0.23 -> 0.23/0.14       0.34/0.22 -> 0.18/0.09
    128 2 8 3        0.09/0.04 -> 0.06/0.04       0.11/0.04 -> 0.13/0.05   (hence: more products)
    128 4 64 5       29/30 -> 5.3/2.9             29/32 -> 4.5/2.8
    8 4 256 3        1.5/1.0 -> 1.2/0.9           2.3/1.4 -> 1.2/1.0
    16 4 256 3       2.5/2.0 -> 2.1/1.6           2.6/2.4 -> 2.4/2.1
    16 4 512 3       12/8.5 -> 11/6.8             12/13 -> 7.5/7.6
    16 4 512 3, / 2  3.5/3.4 -> 2.4/2.0           7.3/7.5 -> 4.7/3.1       (stride 2)
    8 7 512 3        12/13 -> 11/10               17/17 -> 11/11
    1 7 512 3        3.8/3.0 -> 2.3/2.1           9.0/8.1 -> 2.6/2.4
    4 4 128 3        0.33/0.25 -> 0.39/0.24       0.38/0.27 -> 0.37/0.25   (hence: many channels)
    8 8 256 3        4.5/5.6 -> 4.1/4.6           4.2/3.7 -> 7.3/3.2       (hence: rows to channels)
    32 7 512 3       44/43 -> 50/44               50/50 -> 59/46
    64 4 256 3       7.9/7.4 -> 13/7.7            8.3/7.6 -> 8.1/8.3

Fewer features than channels; the last two have holes, one as a layer transposed with stride 2, one
as the gradient of a strided layer's input:

    N H C k O        as they are -> patches
    16 7 1024 3 64   11/11 -> 28/11              (hence: many features)
    16 4 256 3 32    0.54/0.46 -> 1.2/0.63
    512 3 128 5 4    5.1/4.8 -> 35/12            (hence: not few features over edges)
    64 4 256 5 128   16/12, phases -> 93/51      (hence: no holes)
    128 4 64 5 64    5.9/4.6, phases -> 42/20

Whole steps, jit and loop, in comparison with an earlier version that had a product for each tap:
VGG16 1.09, 1.12 times as fast, ResNet50V2 1.63, 1.45, keras-hub's ResNet 1.24, 1.21.

The sums may be computed in another order, which changes the last bits.
"""

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import (
    from_canonical,
    is_weight_gradient,
    to_canonical,
    ungrouped_sizes,
)
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._windows import output_sizes, pad_spatial, strided_window

# Each tap is a slice in the program.
MAX_TAPS = 25
# The least number of channels and of features. Neither may be smaller than the number of rows of
# the product, which are the positions in all images.
MIN_FEATURES = 256
MIN_PRODUCTS = 2**22
# The limits if the kernel is larger than the image.
MIN_CHANNELS_OVER_EDGES = 16
MIN_PRODUCTS_OVER_EDGES = 2**20
# The most bytes of patches that are made at a time.
MAX_BYTES = 2**26


def _applies(eqn: core.JaxprEqn) -> bool:
    """Returns True for kernels larger than the image, and for many channels at few positions."""
    sizes, params = ungrouped_sizes(eqn), eqn.params
    if sizes is None or is_weight_gradient(params) or math.prod(sizes.window) > MAX_TAPS:
        return False
    min_channels = min(sizes.channels, sizes.features)
    has_holes = math.prod(params["lhs_dilation"]) > 1
    is_larger_than_image = all(map(operator.gt, sizes.window, sizes.image))
    if is_larger_than_image and not has_holes:
        return min_channels >= MIN_CHANNELS_OVER_EDGES and sizes.products >= MIN_PRODUCTS_OVER_EDGES
    # Patches would contain the holes. Shifts, which `_replace` may use for transposed kernels, do
    # not.
    if has_holes and not _is_kernel_transposed(params):
        return False
    positions = sizes.image if _is_kernel_transposed(params) else sizes.positions
    rows = sizes.batch * math.prod(positions)
    return max(rows, MIN_FEATURES) <= min_channels and sizes.products >= MIN_PRODUCTS


def _is_kernel_transposed(params: dict[str, Any]) -> bool:
    """Returns True if the kernel is `[O, I]` at each tap, as in the gradient of a layer's input."""
    out_axis, in_axis, *_ = params["dimension_numbers"].rhs_spec
    return bool(out_axis < in_axis)


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Computes a product of patches, or shifts if transposing the kernel would cost more."""
    numbers, dtype = params["dimension_numbers"], params["preferred_element_type"] or lhs.dtype
    image, kernel = to_canonical(lhs, rhs, numbers)
    product = functools.partial(
        lax.dot_general,
        precision=params["precision"],
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    # With so few pixels, the kernel is the largest array that is read.
    has_few_pixels = math.prod(image.shape[:-1]) <= image.shape[-1]
    use_shifts = _is_kernel_transposed(params) and has_few_pixels
    method = _sum_of_shifts if use_shifts else _product_of_patches
    out = lax.convert_element_type(method(product, image, kernel, params), dtype)
    return from_canonical(out, numbers)


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

    positions = math.prod(jax.eval_shape(convolve, x[:1]).shape[:-1])
    max_images = max(1, MAX_BYTES // (positions * len(weights) * x.dtype.itemsize))
    if len(x) <= max_images:
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


patch_conv = Rewrite(
    name="patch_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="small images: one matrix product for all taps",
)
