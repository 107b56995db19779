"""Depthwise convolutions as a sum of shifted products.

XLA's CPU backend runs them in slow kernels, and the gradient of the weights (a convolution whose
window is the image) in ones that are slower still. Milliseconds, on 2 cores with jax 0.10, alone
under `jit` and as the body of a scan (`jit/scan`); image `[N, H, H, C]`, kernel k, stride s,
channel multiplier m, float32 but for the last:

    N H C k s m          forward as is -> shifts    of the input             of the weights
    8 16 96 3 1 1        4.0/3.8 -> 0.4/0.5         4.1/0.15 -> 0.5/0.5      2.9/168 -> 1.4/1.0
    8 8 240 5 1 1        4.0/3.8 -> 0.4/0.15        3.9/0.18 -> 0.3/0.15     8.0/420 -> 1.1/0.8
    8 8 96 7 1 1         2.4/2.2 -> 0.4/0.13        2.4/0.6 -> 0.5/0.15      3.1/108 -> 1.2/1.0
    8 2 960 3 1 1        2.3/2.2 -> 0.4/0.1         2.3/0.03 -> 0.3/0.1      28/35 -> 0.3/0.1
    8 16 96 3 2 1        1.2/1.0 -> 0.4/0.2         11/0.13 -> 0.7/0.5       1.0/32 -> 0.9/0.4
    8 56 96 3 1 1        45/47 -> 2.4/7.8           46/1.4 -> 2.3/5.8        7200/1870 -> 10/8
    8 16 32 3 1 2        1.5/1.3 -> 0.3/0.3         5.4/0.2 -> 0.3/0.3       101/1.0 -> 0.8/0.6
    8 56 32 3 1 4        18/19 -> 3.0/9.7           89/4.1 -> 3.7/7.4        3270/59 -> 9.4/8.5
    8 16 32 3 1 16       1.9/1.7 -> 0.9/2.1         (so: at most 4)          111/12 -> 2.1/1.3
    8 16 96 3 1 1, bf16  4.2/3.9 -> 0.9/0.3         4.2/0.2 -> 0.5/0.4       1.9/113 -> 0.9/0.7

Only the gradient of the input is faster as it is, and in a scan only; the layer as a whole never
is. The sums are taken in another order: last bits change.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import from_canonical, groups, ndim, to_canonical
from functrain.rewrites._frame import Rewrite
from functrain.rewrites._windows import padded, positions, wide, window_at

# Each tap is a slice in the program: 11 x 11 still compiles in a second, 31 x 31 would not.
MOST_TAPS = 128
# Wider groups are matrix products, which grouped_conv leaves to the kernel made for them.
MOST_CHANNELS = 4
HALVINGS = 3


def _applies(eqn: core.JaxprEqn) -> bool:
    shape = groups(eqn)
    return (
        shape is not None
        and ndim(eqn.invars[0]) > 2
        and shape.taps <= MOST_TAPS
        and min(shape.sides) == 1
        and max(shape.sides) <= MOST_CHANNELS
    )


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Sums in float32 at least, as XLA's own kernels do, and rounds once."""
    numbers, dtype = params["dimension_numbers"], params["preferred_element_type"] or lhs.dtype
    lhs, rhs = to_canonical(lhs, rhs, numbers)
    lhs = padded(lhs, params["padding"], params["lhs_dilation"])
    by_batch = params["batch_group_count"] > 1
    out = (_weight_gradient if by_batch else _shift_sum)(lhs, rhs, params)
    return from_canonical(lax.convert_element_type(out, dtype), numbers)


def _shift_sum(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """`out[n, s, g, o] = sum over w, i of lhs[n, s + w, g, i] rhs[w, i, g, o]`."""
    count, inputs, window = params["feature_group_count"], rhs.shape[-2], rhs.shape[:-2]
    strides, apart = params["window_strides"], params["rhs_dilation"]
    sizes = positions(lhs.shape[1:-1], window, strides, apart)
    rhs = jnp.swapaxes(rhs.reshape(-1, count, rhs.shape[-1] // count), 1, 2)  # [W I, O, G]
    terms: list[jax.Array] = []
    for tap in itertools.product(*map(range, window)):
        x = window_at(lhs, tap, apart, sizes, strides)
        x = x.reshape(*x.shape[:-1], count, inputs)
        for i in range(inputs):
            w = lax.index_in_dim(rhs, len(terms), keepdims=False)
            x_i = lax.index_in_dim(x, i, axis=-1, keepdims=False)
            terms.append(wide(jnp.expand_dims(x_i, -2)) * wide(w))
    out = jnp.swapaxes(functools.reduce(lax.add, terms), -1, -2)
    return lax.collapse(out, out.ndim - 2)


def _weight_gradient(lhs: jax.Array, rhs: jax.Array, params: dict[str, Any]) -> jax.Array:
    """`out[n, s, g, o] = sum over w, i of lhs[g, n, s + w, i] rhs[w, i, g, o]`.

    The window is as large as an image here, and the result as small as a kernel: one sum for each
    of its places. Written out along the last axis only, in a loop along the others: 7 x 7 would
    take seconds to compile.
    """
    count, window = params["batch_group_count"], rhs.shape[:-2]
    strides, apart = params["window_strides"], params["rhs_dilation"]
    lhs = lhs.reshape(count, -1, *lhs.shape[1:])
    lhs = jnp.moveaxis(lhs, (-1, 1, 0), (0, -2, -1))  # [I, *S, N, G]
    rhs = jnp.moveaxis(rhs.reshape(*rhs.shape[:-1], count, -1), (-3, -1, -2), (0, -2, -1))
    rhs = wide(jnp.expand_dims(rhs, -3))  # [I, *W, 1, O, G]
    *rows, columns = positions(lhs.shape[1:-2], window, strides, apart)
    extents = [(size - 1) * step + 1 for size, step in zip(window, apart, strict=True)]

    def row(at: Sequence[Any]) -> jax.Array:
        band = lhs
        for axis, place in enumerate(at):
            band = lax.dynamic_slice_in_dim(
                band, place * strides[axis], extents[axis], axis=1 + axis
            )
        origin = [0] * len(at)
        return jnp.stack(
            [
                _sum(
                    wide(window_at(band, [*origin, c], strides, window, apart))[..., None, :] * rhs
                )
                for c in range(columns)
            ]
        )

    out = _loop(row, rows)  # [*S', N, O, G]
    out = jnp.moveaxis(out, (-3, -1, -2), (0, -2, -1))
    return lax.collapse(out, out.ndim - 2)


def _loop(fn: Callable[[Sequence[Any]], jax.Array], sizes: Sequence[int]) -> jax.Array:
    """Stacks `fn` of all indices under some sizes, in a loop of the program each."""
    if not sizes:
        return fn([])

    def body(carry: tuple[()], at: jax.Array) -> tuple[tuple[()], jax.Array]:
        return carry, _loop(lambda rest: fn([at, *rest]), sizes[1:])

    return lax.scan(body, (), lax.iota(jnp.int32, sizes[0]))[1]


def _sum(x: jax.Array) -> jax.Array:
    """Sums all but the last three axes.

    The first is halved some times before: these additions run over many channels at once, where
    XLA's reduction adds up one number after the other.
    """
    for _ in range(HALVINGS):
        half, odd = divmod(x.shape[0], 2)
        if odd:
            break
        x = x[:half] + x[half:]
    return jnp.sum(x, axis=tuple(range(x.ndim - 3)))


depthwise_conv = Rewrite(
    name="depthwise_conv",
    primitive=primitives.conv_general_dilated_p,
    exact=False,
    applies=_applies,
    replace=_replace,
    reason="a sum of shifted products beats XLA's kernel",
)
