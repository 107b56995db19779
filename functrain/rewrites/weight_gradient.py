"""Gradients of the weights of ordinary 2-D convolutions, as matrix products of patches.

XLA's CPU backend takes them for a convolution whose window is the image, and reaches a fifth of
the rate of a matrix product. Patches of some images at a time, so few that they stay in the cache,
are faster to make and to multiply.

Milliseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`); the layer's image is
`[N, H, H, C]`, its kernel k x k, its features O, its stride s, float32 but for the last:

    N H C k O s              canonical -> patches
    32 13 32 3 64 1          1.6/1.1 -> 0.84/0.69
    64 14 32 3 32 1          2.4/2.1 -> 1.4/1.2
    64 28 16 3 16 1          2.4/2.1 -> 1.8/1.5
    64 7 64 3 64 1           1.7/1.4 -> 1.3/0.99
    64 28 16 3 32 2          2.1/1.5 -> 0.99/0.71
    8 56 64 3 64 1           15/15 -> 8.8/9.0
    16 32 96 3 96 1          18/19 -> 9.4/10
    8 32 64 5 64 1           7.7/7.5 -> 7.1/6.8
    16 4 256 3 256 1         2.0/1.8 -> 1.5/1.1
    32 7 128 3 128 1         1.7/1.4 -> 1.7/1.6    (so: fewer channels, or few rows)
    32 28 1 3 32 1           0.47/0.29 -> 0.33/0.11
    128 32 3 3 16 1          2.6/2.4 -> 3.4/3.3    (so: of few channels many features)
    8 70 3 7 64 2            2.3/2.6 -> 4.1/5.1
    8 32 3 7 64 1            2.0/1.9 -> 3.7/4.4
    8 38 3 5 64 1            1.3/1.2 -> 2.0/1.9
    32 28 1 5 32 1           1.2/1.0 -> 1.9/1.3
    64 32 3 3 32 1           4.6/5.8 -> 4.0/4.1    (so: of few channels few taps)
    4 112 32 3 32 1          8.6/9.0 -> 17/8.3     (so: one image's patches in the cache)
    16 16 64 3 64 1, bf16    2.4/2.2 -> 1.5/1.3
    4 13 32 3 64 1           0.38/0.28 -> 0.58/0.51 (so: many products at each tap)
    8 3 64 3 64 1            0.12/0.07 -> 0.14/0.09
    4 28 16 5 32 1           1.0/0.85 -> 1.8/1.2
    16 10 120 5 256 1        13/13 -> 20/18        (so: many taps where the features are no
    32 7 48 5 128 1          3.1/2.8 -> 4.6/3.7    multiple of 128, in which XLA is fast, or
    64 12 32 5 192 1         21/21 -> 18/17        for many rows)
    128 12 16 5 192 1        26/24 -> 19/19

Where one product takes all images, it stands in a branch of its own: the compiler fused what makes
its operands with it, once for each tap that reads them. Whole steps under `jit`, in milliseconds,
2 cores of an AMD EPYC, without the rule -> fused -> in a branch: MobileNetV2 16.9 -> 18.5 -> 16.9,
keras-hub's ResNet 62 -> 73 -> 64, InceptionV3 143 -> 146 -> 130; in loops the branch
is 0.97 to 1.07 times as fast.

A convolution over the edges of small images has such a form, too, and pays as well; but not with a
stride (64 images of 8x8x128, 5x5, 256 features, stride 2: 12 -> 15), nor of many images with few
channels (4096 of 4x4x8, 5x5, 1 feature: 2.7 -> 5.2).

Sums are taken in another order: last bits change.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import avals, from_canonical, is_weight_gradient, ungrouped_sizes
from functrain.rewrites._frame import Rewrite
from functrain.rewrites._windows import (
    call_unfused,
    output_sizes,
    pad_spatial,
    strided_window,
    zeros_for_sum,
)

# Each is a slice in the program.
MAX_TAPS = 49
MAX_CHANNELS = 127
# A product's rows are the places of all images: with fewer of these, more channels pay, too.
FEW_ROWS = 256
FEW_CHANNELS, MIN_FEATURES, FEW_TAPS = 4, 32, 9
# Of each tap, but of few channels.
MIN_PRODUCTS = 2**21
# With more taps than FEW_TAPS XLA is fast for a multiple of so many features, but for many rows.
BLOCK, MANY_ROWS = 128, 2**13
# Bytes that stay in the cache between being written and being read.
CACHE_BYTES = 5 * 2**19
# Numbers that a row of patches needs for a fast product: the taps of one row of the kernel, if
# they have so many together, or all taps.
MIN_ROW_WIDTH = 96


class Taps(NamedTuple):
    """The taps of a kernel `[K, L]`: where they are in the image, and which are taken together.

    Attributes:
      sizes: K and L.
      apart: How far one tap is from the next, along both axes.
      strides: How far one place of the kernel is from the next.
      by_row: Whether the patches are those of a single row of taps, and each row has a product.
    """

    sizes: tuple[int, int]
    apart: tuple[int, int]
    strides: tuple[int, int]
    by_row: bool

    def numbers(self, image: Sequence[int], places: Sequence[int], channels: int) -> int:
        """Returns how many numbers the patches of a padded image hold."""
        rows, taps = (
            (image[0], self.sizes[1]) if self.by_row else (places[0], math.prod(self.sizes))
        )
        return rows * places[1] * taps * channels


def _taps(sizes: Sequence[int], channels: int, params: dict[str, Any]) -> Taps:
    down, across = sizes
    by_row = across * channels >= MIN_ROW_WIDTH
    return Taps((down, across), params["window_strides"], params["rhs_dilation"], by_row)


def _applies(eqn: core.JaxprEqn) -> bool:
    """In the sizes of such a convolution channels are the batch, and images the channels."""
    shape, params = ungrouped_sizes(eqn), eqn.params
    if shape is None or len(shape.window) != 2 or math.prod(params["lhs_dilation"]) > 1:
        return False
    channels, places, taps = shape.batch, shape.window, _taps(shape.positions, shape.batch, params)
    if not 1 < math.prod(taps.sizes) <= min(MAX_TAPS, math.prod(places)):
        return False
    rows, of_weights = shape.channels * math.prod(places), is_weight_gradient(params)
    if channels > MAX_CHANNELS and not (rows <= FEW_ROWS and of_weights):
        return False
    if math.prod(params["window_strides"]) > 1 and not of_weights:
        return False
    many_taps = math.prod(taps.sizes) > FEW_TAPS
    if channels <= FEW_CHANNELS and (shape.features < MIN_FEATURES or many_taps):
        return False
    if many_taps and of_weights and shape.features % BLOCK == 0 and rows < MANY_ROWS:
        return False
    if channels > FEW_CHANNELS and shape.products < MIN_PRODUCTS * math.prod(taps.sizes):
        return False
    image = [sum(pad) + size for size, pad in zip(shape.image, params["padding"], strict=True)]
    itemsize: int = avals(eqn)[0].dtype.itemsize
    return taps.numbers(image, places, channels) * itemsize <= CACHE_BYTES


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """`out[c, k, l, o] = sum over n, i, j of x[n, i + k, j + l, c] g[n, i, j, o]`."""
    numbers = params["dimension_numbers"]
    channels, batch, *spatial = numbers.lhs_spec
    features, into, *window = numbers.rhs_spec
    x = lax.transpose(lhs, (batch, *spatial, channels))
    x = pad_spatial(x, params["padding"], params["lhs_dilation"])
    g = lax.transpose(rhs, (into, *window, features))
    sizes = output_sizes(
        x.shape[1:3], g.shape[1:3], params["window_strides"], params["rhs_dilation"]
    )
    taps = _taps(sizes, x.shape[-1], params)

    def products(x: jax.Array, g: jax.Array) -> jax.Array:
        return _products(x, g, taps, params["precision"])

    each = taps.numbers(x.shape[1:3], g.shape[1:3], x.shape[-1]) * x.dtype.itemsize
    out = _summed(products, x, g, max(1, CACHE_BYTES // each))  # [K or 1, A, B]
    if not _features_last(taps, x, g):
        out = jnp.swapaxes(out, 1, 2)
    out = out.reshape(*sizes, x.shape[-1], g.shape[-1])
    out = lax.convert_element_type(out, params["preferred_element_type"] or lhs.dtype)
    return from_canonical(jnp.moveaxis(out, 2, 0), numbers)


def _summed(products: Callable[..., jax.Array], x: jax.Array, g: jax.Array, most: int) -> jax.Array:
    """Sums the products of so many images at a time, or of as many fewer as divide them all.

    A loop is fused with nothing around it; where one turn is all, a branch does that.
    """
    n = len(x)
    at_once = max(size for size in range(1, min(n, most) + 1) if n % size == 0)
    if at_once == n:
        return call_unfused(products, x, g)
    some = tuple(v.reshape(-1, at_once, *v.shape[1:]) for v in (x, g))
    start = zeros_for_sum(jax.eval_shape(products, *(v[0] for v in some)), x, g)
    return lax.scan(lambda total, xg: (total + products(*xg), None), start, some)[0]


def _products(x: jax.Array, g: jax.Array, taps: Taps, precision: Any) -> jax.Array:
    """Returns `[K, L C, O]`, or `[1, K L C, O]`; the last two swapped if `O` is the smaller."""
    (rows, columns), places = taps.sizes, g.shape[1:3]
    if taps.by_row:  # every row of the image, of which a row of taps then sees some
        each = [(0, j) for j in range(columns)]
        patches = _patches(x, each, taps.apart, (x.shape[1], places[1]), (1, taps.strides[1]))
        down = taps.apart[0], 1
        some = [
            strided_window(patches, (i, 0), down, places, (taps.strides[0], 1)) for i in range(rows)
        ]
    else:
        each = list(itertools.product(range(rows), range(columns)))
        some = [_patches(x, each, taps.apart, places, taps.strides)]
    features_last = _features_last(taps, x, g)

    def product(patches: jax.Array) -> jax.Array:
        a, b = (lax.collapse(v, 0, 3) for v in (patches, g))
        return lax.dot_general(
            *((a, b) if features_last else (b, a)),
            (((0,), (0,)), ((), ())),
            precision=precision if features_last else precision and precision[::-1],
            preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
        )

    return jnp.stack([product(patches) for patches in some])


def _patches(x: jax.Array, taps: Any, apart: Any, places: Any, strides: Any) -> jax.Array:
    """Returns what each tap sees from each place, side by side: `[N, *places, taps C]`."""
    return lax.concatenate([strided_window(x, tap, apart, places, strides) for tap in taps], 3)


def _features_last(taps: Taps, x: jax.Array, g: jax.Array) -> bool:
    """Whether a product is `[L C, O]`: a wide one is faster than a high one."""
    columns = taps.sizes[1] if taps.by_row else math.prod(taps.sizes)
    return columns * x.shape[-1] <= g.shape[-1]


weight_gradient = Rewrite(
    name="weight_gradient",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="matrix products of patches that stay in the cache",
)
