"""Sizes, layouts, windows and checks that the convolution rewrites share.

Shapes are in the canonical layout: lhs `[N, *S, C]`, rhs `[*W, I, O]`, result `[N, *S', O]`. I is
the number of channels that are summed over: C, or C / G with G groups of features.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, primitives

from functrain.rewrites._equations import are_floats, avals, is_sharded, is_sharding_free
from functrain.rewrites._rewrite import Rewrite, rewrite


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


def canonical_rewrite(
    applies: Callable[[JaxprEqn], bool], reason: str, **options: Any
) -> Callable[[Callable[..., jax.Array]], Rewrite]:
    """Returns a decorator like `rewrite`, for a function of operands in the canonical layout.

    The function returns a canonical result, which may have a wider dtype than the convolution.
    """

    def make(fn: Callable[..., jax.Array]) -> Rewrite:
        @functools.wraps(fn)
        def replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
            numbers = params["dimension_numbers"]
            out = fn(*to_canonical(lhs, rhs, numbers), **params)
            dtype = params["preferred_element_type"] or lhs.dtype
            return from_canonical(lax.convert_element_type(out, dtype), numbers)

        conv_p = primitives.conv_general_dilated_p
        return rewrite(conv_p, applies, reason, **options)(replace)

    return make


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
        """The number of multiplications, including those with padding and holes."""
        sums = self.batch * math.prod(self.positions) * self.features
        return sums * math.prod(self.window) * self.channels


def conv_sizes(eqn: JaxprEqn) -> Sizes | None:
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


def ungrouped_sizes(eqn: JaxprEqn) -> Sizes | None:
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

    With G groups of features lhs is `[N, *S, G I]` and rhs `[*W, I, G O]`; with G groups of the
    batch, as in the gradient of the weights, lhs is `[G N, *S, I]`.

    Attributes:
      sides: The two sizes of the product of one group and tap: `(I, O)`, or by batch `(N, O)`.
      taps: The taps of the layer's kernel: `prod(W)`, or by batch `prod(S')`, since the result of
        that gradient has the shape of the kernel.
    """

    sides: tuple[int, int]
    taps: int


def conv_groups(eqn: JaxprEqn) -> Groups | None:
    """Returns the groups of a grouped convolution that may be rewritten, otherwise None."""
    sizes, params = conv_sizes(eqn), eqn.params
    if sizes is None:
        return None
    if (count := params["batch_group_count"]) > 1:
        sides = sizes.batch // count, sizes.features // count
        return Groups(sides, math.prod(sizes.positions))
    if (count := params["feature_group_count"]) > 1:
        return Groups((sizes.channels, sizes.features // count), math.prod(sizes.window))
    return None


def output_sizes(
    sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Returns the number of positions of a window along each axis.

    Args:
      sizes: The sizes of the axes, including padding and holes.
      window: The number of taps of the window along each axis.
      strides: The distance between two positions of the window.
      dilation: The distance between two taps of the window.
    """
    return [
        (size - dilated_size(taps, step)) // stride + 1
        for size, taps, stride, step in zip(sizes, window, strides, dilation, strict=True)
    ]


def conv_positions(
    image: Sequence[int], window: Sequence[int], params: dict[str, Any]
) -> list[int]:
    """Returns the number of positions of a convolution's window along each spatial axis."""
    sizes = [
        dilated_size(size, dilation) + sum(ends)
        for size, dilation, ends in zip(
            image, params["lhs_dilation"], params["padding"], strict=True
        )
    ]
    return output_sizes(sizes, window, params["window_strides"], params["rhs_dilation"])


def dilated_size(size: int, dilation: int) -> int:
    """Returns the size of an axis after its elements are moved `dilation` apart."""
    return (size - 1) * dilation + 1


def strided_window(
    x: jax.Array,
    index: Sequence[int],
    index_strides: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
) -> jax.Array:
    """Returns one strided window of the spatial axes, `[N, *sizes, ...]`.

    The window starts at ``index * index_strides``. A tap's view of an image has the tap as its
    index, the positions of the kernel as its sizes, and the stride of the kernel.
    """
    starts = list(map(operator.mul, index, index_strides))
    limits = map(operator.add, starts, map(dilated_size, sizes, strides))
    # The spatial axes are those after the batch; the others are taken whole.
    others = x.shape[1 + len(starts) :]
    starts, steps = [0, *starts, *[0] * len(others)], [1, *strides, *[1] * len(others)]
    return lax.slice(x, starts, [len(x), *limits, *others], steps)


def pad_spatial(
    lhs: jax.Array, padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> jax.Array:
    """Pads the spatial axes with zeros, between elements too; negative padding crops."""
    spatial = [(low, high, d - 1) for (low, high), d in zip(padding, dilation, strict=True)]
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *spatial, (0, 0, 0)])


def crop(
    lhs: jax.Array, axes: Sequence[int], params: dict[str, Any]
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns an image and the parameters of its convolution without negative padding in front.

    Args:
      lhs: The image.
      axes: The spatial axes of the image.
      params: The parameters of an equation; its dimension numbers are ignored.
    """
    padding = list(params["padding"])
    for i, (axis, dilation) in enumerate(zip(axes, params["lhs_dilation"], strict=True)):
        low, high = padding[i]
        if low >= 0:
            continue
        size = lhs.shape[axis]
        # Rounded up: if the padding ends between two pixels, the holes up to the next one stay.
        cut = -(low // dilation)
        if cut < size:
            padding[i] = (low + cut * dilation, high)
        else:
            padding[i] = (0, dilated_size(size, dilation) + low + high)
        lhs = lax.slice_in_dim(lhs, min(cut, size), None, axis=axis)
    return lhs, params | {"padding": tuple(padding)}


def at_least_float32(x: jax.Array) -> jax.Array:
    """Converts narrower floats to float32, the dtype that sums are computed in."""
    return lax.convert_element_type(x, jnp.promote_types(x.dtype, jnp.float32))


def zeros_for_sum(like: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
    """Returns zeros of a shape and dtype, as the initial value of a loop that sums over `arrays`.

    Inside shard_map, a type contains the mesh axes over which a value varies, and the carry of a
    loop must keep its type. The sum over an empty slice is 0 and has the type of the array.
    """
    zero = sum(jnp.sum(x[:0]) for x in arrays)
    return jnp.broadcast_to(jnp.asarray(zero, like.dtype), like.shape)
