"""Convolutions of small images as one matrix product: of patches (im2col), or of the image.

What all taps see is multiplied by the kernel at once. In the gradient of the input the kernel has
to be turned for that; where it is the most that is read, what each number gives to all taps is
computed at once instead, and then shifted and added up.

Where the kernel is larger than the image, XLA's CPU backend runs up to a hundred times slower than
the arithmetic is worth, and some twenty times for few channels. Elsewhere a product pays where it
has no more rows than channels, nor than features. Patches of an image with holes would hold the
holes: those are left to `phased_conv`, but where shifts do without.

Milliseconds, 2 cores of an AMD EPYC, jax 0.10, alone under `jit` and in a loop (`jit/loop`); image
`[N, H, H, C]`, k x k kernel, as many features; without the rule others apply:

    N H C k          forward: without -> with     of the input: without -> with
    256 2 512 3      2196/2158 -> 38/27           2233/2150 -> 51/31
    256 2 256 3      160/164 -> 8.1/5.8           168/167 -> 7.2/6.0
    64 2 128 3       1.6/1.1 -> 0.9/0.8           1.5/1.0 -> 1.3/0.9
    256 2 64 3       10/5.1 -> 0.7/0.6            5.5/5.3 -> 0.7/0.5
    1024 2 32 3      6.7/7.0 -> 1.3/0.6           7.4/7.1 -> 0.7/1.0
    256 2 16 3       0.37/0.23 -> 0.23/0.14       0.34/0.22 -> 0.18/0.09
    128 2 8 3        0.09/0.04 -> 0.06/0.04       0.11/0.04 -> 0.13/0.05   (so: more products)
    128 4 64 5       29/30 -> 5.3/2.9             29/32 -> 4.5/2.8
    8 4 256 3        1.5/1.0 -> 1.2/0.9           2.3/1.4 -> 1.2/1.0
    16 4 256 3       2.5/2.0 -> 2.1/1.6           2.6/2.4 -> 2.4/2.1
    16 4 512 3       12/8.5 -> 11/6.8             12/13 -> 7.5/7.6
    16 4 512 3, / 2  3.5/3.4 -> 2.4/2.0           7.3/7.5 -> 4.7/3.1       (stride 2)
    8 7 512 3        12/13 -> 11/10               17/17 -> 11/11
    1 7 512 3        3.8/3.0 -> 2.3/2.1           9.0/8.1 -> 2.6/2.4
    4 4 128 3        0.33/0.25 -> 0.39/0.24       0.38/0.27 -> 0.37/0.25   (so: many channels)
    8 8 256 3        4.5/5.6 -> 4.1/4.6           4.2/3.7 -> 7.3/3.2       (so: rows to channels)
    32 7 512 3       44/43 -> 50/44               50/50 -> 59/46
    64 4 256 3       7.9/7.4 -> 13/7.7            8.3/7.6 -> 8.1/8.3

Fewer features than channels; the last two have holes, as a layer transposed with stride 2, and as
the gradient of a strided layer's input:

    N H C k O        as they are -> patches
    16 7 1024 3 64   11/11 -> 28/11              (so: many features)
    16 4 256 3 32    0.54/0.46 -> 1.2/0.63
    512 3 128 5 4    5.1/4.8 -> 35/12            (so: not few features over edges)
    64 4 256 5 128   16/12, phases -> 93/51      (so: no holes)
    128 4 64 5 64    5.9/4.6, phases -> 42/20

Whole steps, jit and loop, beside a product for each tap as it was before: VGG16 1.09, 1.12 times as
fast, ResNet50V2 1.63, 1.45, keras-hub's ResNet 1.24, 1.21.

Sums may be taken in another order: last bits change.
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
from functrain.rewrites._frame import Rewrite
from functrain.rewrites._windows import output_sizes, pad_spatial, strided_window

# Each is a slice in the program.
MAX_TAPS = 25
# Of channels and of features, and no fewer than the product has rows: the places of all images.
MIN_FEATURES = 256
MIN_PRODUCTS = 2**22
# Where the kernel is larger than the image.
MIN_OVER_EDGES = 16
MIN_PRODUCTS_OVER_EDGES = 2**20
# Bytes of the patches that are made at a time.
MAX_BYTES = 2**26


def _applies(eqn: core.JaxprEqn) -> bool:
    shape, params = ungrouped_sizes(eqn), eqn.params
    if shape is None or is_weight_gradient(params) or math.prod(shape.window) > MAX_TAPS:
        return False
    least, holes = min(shape.channels, shape.features), math.prod(params["lhs_dilation"]) > 1
    if all(taps > size for taps, size in zip(shape.window, shape.image, strict=True)) and not holes:
        return least >= MIN_OVER_EDGES and shape.products >= MIN_PRODUCTS_OVER_EDGES
    if holes and not _is_turned(params):  # patches would hold them
        return False
    places = shape.image if _is_turned(params) else shape.positions
    rows = shape.batch * math.prod(places)
    return max(rows, MIN_FEATURES) <= least and shape.products >= MIN_PRODUCTS


def _is_turned(params: dict[str, Any]) -> bool:
    """Whether the kernel is `[O, I]` at each tap, as in the gradient of a layer's input."""
    out_axis, in_axis, *_ = params["dimension_numbers"].rhs_spec
    return bool(out_axis < in_axis)


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Takes patches, unless to turn the kernel for them costs more than to shift the results."""
    numbers, dtype = params["dimension_numbers"], params["preferred_element_type"] or lhs.dtype
    image, kernel = to_canonical(lhs, rhs, numbers)
    product = functools.partial(
        lax.dot_general,
        precision=params["precision"],
        preferred_element_type=jnp.promote_types(dtype, jnp.float32),
    )
    shifts = _is_turned(params) and math.prod(image.shape[:-1]) <= image.shape[-1]
    way = _sum_of_shifts if shifts else _product_of_patches
    out = lax.convert_element_type(way(product, image, kernel, params), dtype)
    return from_canonical(out, numbers)


def _product_of_patches(product: Any, x: jax.Array, kernel: jax.Array, params: Any) -> jax.Array:
    """`[N S', W I] x [W I, O]`: what all taps see, side by side, of some images at a time."""
    high = lax.collapse(kernel, 0, -1)

    def of(x: jax.Array) -> jax.Array:
        patches = lax.concatenate(_windows(x, kernel.shape[:-2], params), x.ndim - 1)
        places: jax.Array = product(lax.collapse(patches, 0, -1), high, (((1,), (0,)), ((), ())))
        return places.reshape(*patches.shape[:-1], -1)

    places = math.prod(jax.eval_shape(of, x[:1]).shape[:-1])
    at_once = max(1, MAX_BYTES // (places * len(high) * x.dtype.itemsize))
    if len(x) <= at_once:
        return of(x)
    out: jax.Array = lax.map(lambda one: of(one[None])[0], x, batch_size=at_once)
    return out


def _sum_of_shifts(product: Any, x: jax.Array, kernel: jax.Array, params: Any) -> jax.Array:
    """`[N S, I] x [W O, I]`: what each number of the image gives to each tap, added up."""
    rows, high = lax.collapse(x, 0, -1), lax.collapse(jnp.swapaxes(kernel, -2, -1), 0, -1)
    given = product(rows, high, (((1,), (1,)), ((), ()))).reshape(*x.shape[:-1], -1)
    shifts = _windows(given, kernel.shape[:-2], params)
    features = kernel.shape[-1]
    each = [
        lax.slice_in_dim(shift, tap * features, (tap + 1) * features, axis=-1)
        for tap, shift in enumerate(shifts)
    ]
    return functools.reduce(operator.add, each)


def _windows(x: jax.Array, window: Sequence[int], params: dict[str, Any]) -> list[jax.Array]:
    """Returns what each tap sees from each place: `[N, *S', C]`."""
    strides, apart = params["window_strides"], params["rhs_dilation"]
    x = pad_spatial(x, params["padding"], params["lhs_dilation"])
    places = output_sizes(x.shape[1:-1], window, strides, apart)
    taps = itertools.product(*map(range, window))
    return [strided_window(x, tap, apart, places, strides) for tap in taps]


patch_conv = Rewrite(
    name="patch_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="small images: one matrix product for all taps",
)
