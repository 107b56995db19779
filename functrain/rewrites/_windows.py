"""Sliding windows over the spatial axes of arrays `[N, *S, ...]`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Each tap of a pooling window is a slice in the program: 3 x 3 x 3 still compiles in a second.
MAX_POOL_TAPS = 27


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
    starts, limits, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    # The spatial axes are those after the batch.
    for axis, (i, step, size, stride) in enumerate(
        zip(index, index_strides, sizes, strides, strict=True), start=1
    ):
        starts[axis] = i * step
        limits[axis] = i * step + dilated_size(size, stride)
        steps[axis] = stride
    return lax.slice(x, starts, limits, steps)


def does_every_window_see_numbers(params: dict[str, Any]) -> bool:
    """Returns True if no window of a pooling sees only padding."""
    return all(
        min(ends) >= 0 and max(ends) < taps
        for ends, taps in zip(params["padding"], params["window_dimensions"], strict=True)
    )


def pool_views(
    x: jax.Array,
    positions: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> list[jax.Array]:
    """Returns what each tap of a pooling window sees at each position; padding is -inf.

    Args:
      x: The array that is pooled.
      positions: The number of positions along each axis, which is the shape of the results.
      window: The number of taps along each axis of `x`, as are the other parameters.
      strides: The distance between two positions.
      padding: The padding before and after each axis.
    """
    x = lax.pad(x, jnp.array(-jnp.inf, x.dtype), [(low, high, 0) for low, high in padding])
    # The sizes of the part of the array between the first and the last position of a tap.
    extents = list(map(dilated_size, positions, strides))
    views = []
    for tap in itertools.product(*map(range, window)):
        limits = [start + extent for start, extent in zip(tap, extents, strict=True)]
        views.append(lax.slice(x, tap, limits, strides))
    return views


def dilated_size(size: int, dilation: int) -> int:
    """Returns the size of an axis after its elements are moved `dilation` apart."""
    return (size - 1) * dilation + 1


def pad_spatial(
    lhs: jax.Array, padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> jax.Array:
    """Pads the spatial axes with zeros, between elements too; negative padding crops."""
    spatial = [(low, high, d - 1) for (low, high), d in zip(padding, dilation, strict=True)]
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *spatial, (0, 0, 0)])


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


def call_unfused(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Returns ``function(*arrays)``, computed in a branch that is always taken.

    XLA cannot know that it is, so it does not fuse the operations of the function with the
    operations around it. The last array must not be empty.
    """

    def zeros(*arrays: jax.Array) -> jax.Array:
        return zeros_for_sum(jax.eval_shape(function, *arrays), *arrays)

    first_element = arrays[-1][(0,) * arrays[-1].ndim]
    # One of the two is true for every number; the second is true for NaN.
    always = (first_element == first_element) | (first_element != first_element)
    out: jax.Array = lax.cond(always, function, zeros, *arrays)
    return out
