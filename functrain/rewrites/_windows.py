"""Windows over the spatial axes of arrays `[N, *S, ...]`: where they are, and what they see."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax


def positions(
    sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], apart: Sequence[int]
) -> list[int]:
    """Returns how many places a window has along each axis."""
    return [
        (size - (taps - 1) * step - 1) // stride + 1
        for size, taps, stride, step in zip(sizes, window, strides, apart, strict=True)
    ]


def window_at(
    x: jax.Array,
    at: Sequence[int],
    apart: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
) -> jax.Array:
    """Slices the spatial axes, those after the first."""
    starts, limits, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for i, place in enumerate(at):
        starts[1 + i] = place * apart[i]
        limits[1 + i] = place * apart[i] + (sizes[i] - 1) * strides[i] + 1
        steps[1 + i] = strides[i]
    return lax.slice(x, starts, limits, steps)


def spread(size: int, holes: int) -> int:
    """Returns the size of an axis whose elements are that far apart."""
    return (size - 1) * holes + 1


def padded(
    lhs: jax.Array, padding: Sequence[tuple[int, int]], dilation: Sequence[int]
) -> jax.Array:
    """Pads the spatial axes, between elements too; negative padding crops."""
    spatial = [(low, high, d - 1) for (low, high), d in zip(padding, dilation, strict=True)]
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), [(0, 0, 0), *spatial, (0, 0, 0)])


def wide(x: jax.Array) -> jax.Array:
    """Converts to float32 at least, which is what sums are taken in."""
    return lax.convert_element_type(x, jnp.promote_types(x.dtype, jnp.float32))


def zeros(like: jax.ShapeDtypeStruct, *of: jax.Array) -> jax.Array:
    """Returns the beginning of a sum over what is made of some arrays.

    Inside shard_map a type says over which mesh axes a value varies, and a loop's sum has to begin
    with the type it ends with. An empty sum of the arrays has it.
    """
    zero = sum(jnp.sum(x[:0]) for x in of)
    return jnp.broadcast_to(jnp.asarray(zero, like.dtype), like.shape)


def unfused(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Returns ``function(*arrays)``, computed in a branch that is always taken.

    The compiler does not know that it is, so it fuses what is in it with nothing around. The last
    array must not be empty.
    """

    def nothing(*arrays: jax.Array) -> jax.Array:
        return zeros(jax.eval_shape(function, *arrays), *arrays)

    any_number = arrays[-1][(0,) * arrays[-1].ndim]
    always = (any_number == any_number) | (any_number != any_number)  # or NaN
    out: jax.Array = lax.cond(always, function, nothing, *arrays)
    return out
