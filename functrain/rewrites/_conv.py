"""Sizes, layouts and checks that the convolution rewrites share.

Shapes are in the canonical layout: lhs `[N, *S, C]`, rhs `[*W, I, O]`, result `[N, *S', O]`. I is
the number of channels that are summed over: C, or C / G with G groups of features.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import are_floats, avals, is_sharded, is_sharding_free


def canonical_numbers(ndim: int) -> lax.ConvDimensionNumbers:
    """Returns the dimension numbers of `[N, *S, C]` x `[*W, I, O]` -> `[N, *S', O]`."""
    spatial = tuple(range(1, ndim - 1))
    data = (0, ndim - 1, *spatial)
    return lax.ConvDimensionNumbers(data, (ndim - 1, ndim - 2, *range(ndim - 2)), data)


def to_canonical(
    lhs: jax.Array, rhs: jax.Array, numbers: lax.ConvDimensionNumbers
) -> tuple[jax.Array, jax.Array]:
    """Transposes both operands to the canonical layout."""
    batch, feature, *spatial = numbers.lhs_spec
    out, into, *window = numbers.rhs_spec
    return lax.transpose(lhs, (batch, *spatial, feature)), lax.transpose(rhs, (*window, into, out))


def from_canonical(out: jax.Array, numbers: lax.ConvDimensionNumbers) -> jax.Array:
    """Transposes a canonical result to the layout that the dimension numbers specify."""
    batch, feature, *spatial = numbers.out_spec
    target_axes = (batch, *spatial, feature)
    return lax.transpose(out, list(map(target_axes.index, range(out.ndim))))


def split_axis(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Splits an axis of size `count k` into two axes, of the sizes `count` and k."""
    return x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :])


def move_groups_last(x: jax.Array, count: int) -> jax.Array:
    """Transposes `[..., G C]` to `[..., C G]`, with G = `count`."""
    return jnp.swapaxes(split_axis(x, x.ndim - 1, count), -1, -2).reshape(x.shape)


class Sizes(NamedTuple):
    """The sizes of a convolution.

    Attributes:
      batch: N.
      image: S, without padding and holes.
      channels: I, the channels that are summed over.
      window: W, without holes.
      features: O.
      positions: S', the number of positions of the window, which is the size of the result.
    """

    batch: int
    image: tuple[int, ...]
    channels: int
    window: tuple[int, ...]
    features: int
    positions: tuple[int, ...]

    @property
    def products(self) -> int:
        """Returns the number of multiplications, including those with padding and holes."""
        sums = self.batch * math.prod(self.positions) * self.features
        return sums * math.prod(self.window) * self.channels


def conv_sizes(eqn: core.JaxprEqn) -> Sizes | None:
    """Returns the sizes of a convolution if it may be rewritten, otherwise None.

    A convolution may be rewritten if it is of real floats of 16 bits or more, with sizes that are
    known and positive, and without sharding except that of the batch.
    """
    lhs, rhs, out = avals(eqn)
    numbers = eqn.params["dimension_numbers"]
    if not are_floats(lhs, rhs, out) or not is_sharding_free(eqn.params):
        return None
    if is_sharded(lhs, except_axis=numbers.lhs_spec[0]) or is_sharded(rhs):
        return None
    # The sums would have to be wider than the float32 or the input's dtype they are computed in.
    if out.dtype.itemsize > max(4, lhs.dtype.itemsize):
        return None
    batch, _, *image = map(lhs.shape.__getitem__, numbers.lhs_spec)
    features, inputs, *window = map(rhs.shape.__getitem__, numbers.rhs_spec)
    positions = map(out.shape.__getitem__, numbers.out_spec[2:])
    return Sizes(batch, tuple(image), inputs, tuple(window), features, tuple(positions))


def ungrouped_sizes(eqn: core.JaxprEqn) -> Sizes | None:
    """Returns the sizes of an ungrouped convolution that may be rewritten, otherwise None."""
    is_ungrouped = eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1
    return conv_sizes(eqn) if is_ungrouped else None


def conv(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Convolves operands in the canonical layout, without groups.

    Args:
      lhs: `[N, *S, C]`.
      rhs: `[*W, C, O]`.
      **params: The parameters of an equation; its groups and dimension numbers are ignored.

    Returns:
      `[N, *S', O]`.
    """
    params |= {"feature_group_count": 1, "batch_group_count": 1}
    params |= {"dimension_numbers": canonical_numbers(lhs.ndim)}
    out: jax.Array = primitives.conv_general_dilated_p.bind(lhs, rhs, **params)
    return out


def is_weight_gradient(params: dict[str, Any]) -> bool:
    """Returns True if a convolution looks like the gradient of a layer's weights.

    jax writes that gradient as a convolution in which channels and batch have swapped places.
    """
    batch, feature, *_ = params["dimension_numbers"].lhs_spec
    return bool(feature < batch)


class Groups(NamedTuple):
    """The sizes of a grouped convolution that its rewrites depend on.

    Attributes:
      num_groups: G. With groups of features lhs is `[N, *S, G I]` and rhs `[*W, I, G O]`; with
        groups of the batch lhs is `[G N, *S, I]`.
      by_batch: Whether the batch is grouped, as in the gradient of the weights, or the features.
      sides: The two sizes of the product of one group and tap: `(I, O)`, or by batch `(N, O)`.
      taps: The taps of the layer's kernel: `prod(W)`, or by batch `prod(S')`, since the result of
        that gradient has the shape of the kernel.
    """

    num_groups: int
    by_batch: bool
    sides: tuple[int, int]
    taps: int


def conv_groups(eqn: core.JaxprEqn) -> Groups | None:
    """Returns the groups of a grouped convolution that may be rewritten, otherwise None."""
    params, sizes = eqn.params, conv_sizes(eqn)
    by_batch = params["batch_group_count"] > 1
    count = params["batch_group_count"] if by_batch else params["feature_group_count"]
    if sizes is None or count == 1:
        return None
    side = sizes.batch // count if by_batch else sizes.channels
    window = sizes.positions if by_batch else sizes.window
    return Groups(count, by_batch, (side, sizes.features // count), math.prod(window))
