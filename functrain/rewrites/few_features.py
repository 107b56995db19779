"""Convolutions with few output features on TPUs, as two convolutions of one axis each.

The matrix unit of a TPU computes 128 output features at once, and XLA gives a convolution with one
output feature as much time as one with 128. Here the first convolution, along the second axis, has
the rows of the kernel as output features. The second one adds up the rows, each shifted by its
place in the kernel: its kernel is a selection of zeros and ones.

Cycles of a v5e, as its compiler estimates them (libtpu 0.0.41), with images of `[N, H, H, C]` and
kernels of k x k x C x O:

    N H C k O         one -> two
    64 28 128 7 1     160,156 -> 45,704
    64 32 64 3 3      245,494 -> 159,040
    32 28 32 5 1      45,667 -> 31,506
    8 14 16 3 1       8,913 -> 19,270 (kept)
    32 28 128 3 8     20,442 -> 30,958 (kept)

A step of the DCGAN of the benchmark takes 874,889 cycles, and 1,192,675 without this rewrite.

The sums of the first convolution are rounded as all inputs of convolutions are on TPUs. A number
that is not finite in one of the features makes all of them NaN, since the selection multiplies it
by zeros.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from functrain.rewrites._conv import canonical_rewrite, conv, ungrouped_sizes

_MAX_FEATURES = 4
# The second convolution costs more than it saves for fewer products.
_MIN_PRODUCTS = 2**24
# The number of output features that the matrix unit computes at once.
_LANES = 128


def _applies(eqn: JaxprEqn) -> bool:
    sizes, params = ungrouped_sizes(eqn), eqn.params
    if sizes is None or len(sizes.window) != 2 or min(sizes.window) == 1:
        return False
    names = ("window_strides", "lhs_dilation", "rhs_dilation")
    is_plain = all(set(params[name]) == {1} for name in names)
    is_narrow = sizes.features <= _MAX_FEATURES
    fits = sizes.window[0] * sizes.features <= _LANES
    return is_plain and is_narrow and fits and sizes.products >= _MIN_PRODUCTS


@canonical_rewrite(
    _applies, "the matrix unit computes many output features at once", platforms=("tpu",)
)
def few_features(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Convolves along the second axis first, with a result for each row of the kernel."""
    rows, columns, channels, features = rhs.shape
    row_padding, column_padding = params["padding"]
    by_row = rhs.transpose(1, 2, 0, 3).reshape(1, columns, channels, rows * features)
    sums = conv(lhs, by_row, **{**params, "padding": ((0, 0), column_padding)})
    # At its row r, the selection takes those features that row r of the kernel has made.
    selection = jnp.eye(rows * features, dtype=sums.dtype).reshape(rows, features, 1, -1)
    selection = selection.transpose(0, 2, 3, 1)
    return conv(sums, selection, **{**params, "padding": (row_padding, (0, 0))})
