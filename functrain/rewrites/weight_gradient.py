"""Gradients of the weights of ordinary 2-D convolutions, as matrix products of patches.

XLA's CPU backend computes them as a convolution whose window is the image, and reaches a fifth of
the rate of a matrix product. Patches of a few images at a time, so few that they stay in the cache,
are faster to make and to multiply.

Milliseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`); the layer's image is
`[N, H, H, C]`, its kernel k x k, its features O, its stride s, float32 except for the row marked:

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
    32 7 128 3 128 1         1.7/1.4 -> 1.7/1.6    (hence: fewer channels, or few rows)
    32 28 1 3 32 1           0.47/0.29 -> 0.33/0.11
    128 32 3 3 16 1          2.6/2.4 -> 3.4/3.3    (hence: of few channels many features)
    8 70 3 7 64 2            2.3/2.6 -> 4.1/5.1
    8 32 3 7 64 1            2.0/1.9 -> 3.7/4.4
    8 38 3 5 64 1            1.3/1.2 -> 2.0/1.9
    32 28 1 5 32 1           1.2/1.0 -> 1.9/1.3
    64 32 3 3 32 1           4.6/5.8 -> 4.0/4.1    (hence: of few channels few taps)
    4 112 32 3 32 1          8.6/9.0 -> 17/8.3     (hence: one image's patches in the cache)
    16 16 64 3 64 1, bf16    2.4/2.2 -> 1.5/1.3
    4 13 32 3 64 1           0.38/0.28 -> 0.58/0.51 (hence: many products at each tap)
    8 3 64 3 64 1            0.12/0.07 -> 0.14/0.09
    4 28 16 5 32 1           1.0/0.85 -> 1.8/1.2
    16 10 120 5 256 1        13/13 -> 20/18        (hence: many taps where the features are no
    32 7 48 5 128 1          3.1/2.8 -> 4.6/3.7    multiple of 128, in which XLA is fast, or
    64 12 32 5 192 1         21/21 -> 18/17        for many rows)
    128 12 16 5 192 1        26/24 -> 19/19

If one product takes all images, it is in a separate branch. Otherwise XLA fuses it with the
operations that compute its operands, and computes those again for each tap that reads them. Whole
steps under `jit`, in milliseconds, 2 cores of an AMD EPYC, without the rule -> fused -> in a
branch: MobileNetV2 16.9 -> 18.5 -> 16.9, keras-hub's ResNet 62 -> 73 -> 64, InceptionV3 143 -> 146
-> 130. In loops the branch is 0.97 to 1.07 times as fast.

A convolution of a small image with a larger kernel has the same form, and becomes faster, too. The
exceptions are those with a stride (64 images of 8x8x128, 5x5, 256 features, stride 2: 12 -> 15),
and those of many images with few channels (4096 of 4x4x8, 5x5, 1 feature: 2.7 -> 5.2).

The sums are computed in another order, which changes the last bits.
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

from functrain.rewrites._conv import from_canonical, is_weight_gradient, ungrouped_sizes
from functrain.rewrites._equations import avals
from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._windows import (
    call_unfused,
    output_sizes,
    pad_spatial,
    strided_window,
    zeros_for_sum,
)

# Each tap is a slice in the program.
MAX_TAPS = 49
MAX_CHANNELS = 127
# The rows of a product are the positions in all images. With fewer rows than this, more channels
# are faster, too.
FEW_ROWS = 256
# For so few channels, the rewrite is faster only with many features and few taps.
FEW_CHANNELS, MIN_FEATURES, FEW_TAPS = 4, 32, 9
# Per tap, except for few channels.
MIN_PRODUCTS = 2**21
# With more taps than FEW_TAPS, XLA is fast if the features are a multiple of BLOCK, except for
# many rows.
BLOCK, MANY_ROWS = 128, 2**13
# Bytes that stay in the cache between being written and being read.
CACHE_BYTES = 5 * 2**19
# Columns that the patches need for a fast product. If a row of taps has so many, each row of taps
# gets a product; otherwise all taps get one product.
MIN_ROW_WIDTH = 96


class Taps(NamedTuple):
    """The taps of a kernel `[K, L]`, and how they are combined into products.

    Attributes:
      sizes: K and L.
      dilation: The distance between neighbouring taps along both axes.
      strides: The distance between neighbouring positions of the kernel.
      by_row: True if each row of taps has its own product; otherwise all taps share one.
    """

    sizes: tuple[int, int]
    dilation: tuple[int, int]
    strides: tuple[int, int]
    by_row: bool

    def patch_elements(self, image: Sequence[int], positions: Sequence[int], channels: int) -> int:
        """Returns the number of elements of the patches of one padded image."""
        rows, taps = positions[0], math.prod(self.sizes)
        if self.by_row:
            rows, taps = image[0], self.sizes[1]
        return rows * positions[1] * taps * channels


def _make_taps(sizes: Sequence[int], channels: int, params: dict[str, Any]) -> Taps:
    down, across = sizes
    by_row = across * channels >= MIN_ROW_WIDTH
    # jax writes the gradient as a convolution by the output's gradient, so the strides of the
    # layer are the dilation of that kernel and vice versa.
    return Taps((down, across), params["window_strides"], params["rhs_dilation"], by_row)


def _applies(eqn: core.JaxprEqn) -> bool:
    """Returns True for the gradients that the table shows to be faster.

    In the sizes of such a convolution, the batch is the layer's channels and the channels are the
    layer's images; the window is the layer's output, and the positions are its taps.
    """
    sizes, params = ungrouped_sizes(eqn), eqn.params
    if sizes is None or len(sizes.window) != 2 or math.prod(params["lhs_dilation"]) > 1:
        return False
    channels, positions = sizes.batch, sizes.window
    taps = _make_taps(sizes.positions, channels, params)
    if not 1 < math.prod(taps.sizes) <= min(MAX_TAPS, math.prod(positions)):
        return False
    rows, of_weights = sizes.channels * math.prod(positions), is_weight_gradient(params)
    if channels > MAX_CHANNELS and not (rows <= FEW_ROWS and of_weights):
        return False
    if math.prod(params["window_strides"]) > 1 and not of_weights:
        return False
    has_many_taps = math.prod(taps.sizes) > FEW_TAPS
    if channels <= FEW_CHANNELS and (sizes.features < MIN_FEATURES or has_many_taps):
        return False
    if has_many_taps and of_weights and sizes.features % BLOCK == 0 and rows < MANY_ROWS:
        return False
    if channels > FEW_CHANNELS and sizes.products < MIN_PRODUCTS * math.prod(taps.sizes):
        return False
    image = [sum(pad) + size for size, pad in zip(sizes.image, params["padding"], strict=True)]
    itemsize: int = avals(eqn)[0].dtype.itemsize
    return taps.patch_elements(image, positions, channels) * itemsize <= CACHE_BYTES


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """`out[c, k, l, o] = sum over n, i, j of x[n, i + k, j + l, c] g[n, i, j, o]`.

    Channel c, tap k, l, feature o; image n, position i, j. x are the layer's images, and g is the
    gradient of its output. The formula leaves out strides, padding and holes.
    """
    numbers = params["dimension_numbers"]
    channels, batch, *spatial = numbers.lhs_spec
    features, into, *window = numbers.rhs_spec
    x = lax.transpose(lhs, (batch, *spatial, channels))
    x = pad_spatial(x, params["padding"], params["lhs_dilation"])
    g = lax.transpose(rhs, (into, *window, features))
    image, positions = x.shape[1:3], g.shape[1:3]
    sizes = output_sizes(image, positions, params["window_strides"], params["rhs_dilation"])
    taps = _make_taps(sizes, x.shape[-1], params)

    def products(x: jax.Array, g: jax.Array) -> jax.Array:
        return _products(x, g, taps, params["precision"])

    bytes_per_image = taps.patch_elements(image, positions, x.shape[-1]) * x.dtype.itemsize
    max_images = max(1, CACHE_BYTES // bytes_per_image)
    out = _sum_over_images(products, x, g, max_images)  # [K or 1, A, B]
    if not _are_features_last(taps, x, g):
        out = jnp.swapaxes(out, 1, 2)
    out = out.reshape(*sizes, x.shape[-1], g.shape[-1])
    out = lax.convert_element_type(out, params["preferred_element_type"] or lhs.dtype)
    return from_canonical(jnp.moveaxis(out, 2, 0), numbers)


def _sum_over_images(
    products: Callable[..., jax.Array], x: jax.Array, g: jax.Array, max_images: int
) -> jax.Array:
    """Sums the products of groups of images, each at most `max_images`.

    All groups have the same size, the largest one that divides the number of images.
    """
    n = len(x)
    group_size = max(size for size in range(1, min(n, max_images) + 1) if n % size == 0)
    # XLA fuses nothing into a loop. A single group needs no loop: `call_unfused` prevents the
    # fusion there.
    if group_size == n:
        return call_unfused(products, x, g)
    groups = tuple(array.reshape(-1, group_size, *array.shape[1:]) for array in (x, g))
    start = zeros_for_sum(jax.eval_shape(products, groups[0][0], groups[1][0]), x, g)
    return lax.scan(lambda total, group: (total + products(*group), None), start, groups)[0]


def _products(x: jax.Array, g: jax.Array, taps: Taps, precision: Any) -> jax.Array:
    """Multiplies patches of the images x by the output's gradient g.

    Returns:
      `[K, L C, O]` if each row of taps has its own product, otherwise `[1, K L C, O]`. The last two
      axes are swapped if O is the smaller.
    """
    (rows, columns), positions = taps.sizes, g.shape[1:3]
    if taps.by_row:
        # The patches of all rows of the image are made once. Each row of taps then sees some of
        # these rows.
        first_row = list(itertools.product([0], range(columns)))
        sizes, strides = (x.shape[1], positions[1]), (1, taps.strides[1])
        all_rows = _make_patches(x, first_row, taps.dilation, sizes, strides)
        row_dilation, row_strides = (taps.dilation[0], 1), (taps.strides[0], 1)
        patches = [
            strided_window(all_rows, (row, 0), row_dilation, positions, row_strides)
            for row in range(rows)
        ]
    else:
        all_taps = list(itertools.product(range(rows), range(columns)))
        patches = [_make_patches(x, all_taps, taps.dilation, positions, taps.strides)]
    features_last = _are_features_last(taps, x, g)
    if not features_last:
        precision = precision and precision[::-1]

    def product(patches: jax.Array) -> jax.Array:
        a, b = lax.collapse(patches, 0, 3), lax.collapse(g, 0, 3)
        return lax.dot_general(
            *((a, b) if features_last else (b, a)),
            (((0,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
        )

    return jnp.stack(list(map(product, patches)))


def _make_patches(x: jax.Array, taps: Any, dilation: Any, sizes: Any, strides: Any) -> jax.Array:
    """Returns what each tap sees at each position, concatenated: `[N, *sizes, taps C]`."""
    return lax.concatenate([strided_window(x, tap, dilation, sizes, strides) for tap in taps], 3)


def _are_features_last(taps: Taps, x: jax.Array, g: jax.Array) -> bool:
    """Returns True if O is the last axis of a product: fewer rows than columns are faster."""
    columns = taps.sizes[1] if taps.by_row else math.prod(taps.sizes)
    return columns * x.shape[-1] <= g.shape[-1]


weight_gradient = Rewrite(
    name="weight_gradient",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="matrix products of patches that stay in the cache",
)
