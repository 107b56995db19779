"""Gradients of maximum pooling by comparing numbers in place.

XLA's CPU backend visits the windows one by one (`select_and_scatter_add`). This rewrite computes
the winning tap of each window from strided slices, and then compares each tap with the winner.
`benchmarks/upstream/max_pool_gradient.py` reproduces it.

Milliseconds, 2 cores, jax 0.10, alone under `jit` and in a loop (`jit/loop`); image `[N, H, H, C]`,
window k x k, stride s:

    N H C k s       as is -> compared in place
    32 26 32 2 2    5.0/7.2 -> 0.14/0.54
    32 10 64 2 2    1.4/2.7 -> 0.05/0.16
    4 8 8 2 2       0.03/0.02 -> 0.04/0.01
    8 58 64 3 2     117/115 -> 16/16
    16 17 64 3 2    5.7/3.2 -> 0.70/0.71
    16 16 64 3 1    21/37 -> 1.5/1.8
    2 8 4 3 2       0.01/0.01 -> 0.01/0.01

If windows overlap, the computation is in a separate branch: fused with the gradient of a ReLU and a
normalization, the kernel would not be vectorized. Milliseconds of all three, 2 cores, on a busy
machine:

    N H C k s       as is -> fused -> in a branch
    16 16 64 3 1    8.0/7.5 -> 13/13 -> 1.8/1.4
    8 32 64 3 2     6.1/5.5 -> 2.1/1.5 -> 2.3/1.6
    8 58 64 3 2     38/24 -> 11/8.7 -> 8.7/10
    16 17 64 3 2    3.7/3.4 -> 1.4/1.0 -> 1.4/1.0
    2 8 4 3 2       0.13/0.05 -> 0.19/0.05 -> 0.12/0.03

Ties go to the first number, as in XLA. A NaN wins over the numbers before it and loses to those
after it, and its own gradient is NaN. If windows do not overlap, nothing is summed and the rewrite
alone keeps every bit. But XLA fuses it with the operations around it, which may then round
differently.
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, primitives

from functrain.rewrites._conv import at_least_float32, dilated_size, zeros_for_sum
from functrain.rewrites._equations import are_floats, avals, is_sharded
from functrain.rewrites._rewrite import rewrite

# Each tap of a pooling window is a slice in the program: 3 x 3 x 3 still compiles in a second.
MAX_TAPS = 27


def _applies(eqn: JaxprEqn) -> bool:
    params = eqn.params
    return (
        params["select_prim"] is primitives.ge_p
        and are_floats(*avals(eqn))
        and not any(map(is_sharded, avals(eqn)))
        and does_every_window_see_numbers(params)
        and 1 < math.prod(params["window_dimensions"]) <= MAX_TAPS
    )


def does_every_window_see_numbers(params: dict[str, Any]) -> bool:
    """Returns True if no window of a pooling sees only padding."""
    return all(
        min(ends) >= 0 and max(ends) < taps
        for ends, taps in zip(params["padding"], params["window_dimensions"], strict=True)
    )


@rewrite(
    primitives.select_and_scatter_add_p,
    _applies,
    "comparing in place beats visiting the windows one by one",
)
def max_pool_gradient(source: jax.Array, operand: jax.Array, **params: Any) -> jax.Array:
    """Compares the number of each tap with the winner of its window."""

    def sum_taps(source: jax.Array, operand: jax.Array) -> jax.Array:
        return _sum_taps(source, operand, **params)

    if params["window_dimensions"] == params["window_strides"]:
        gradient = sum_taps(source, operand)
    else:
        gradient = _call_unfused(sum_taps, source, operand)
    # Where XLA vectorizes max pooling on CPU, it drops a NaN (jax 0.10 to 0.12). The gradient keeps
    # it, so that a step with a NaN can be recognized.
    return jnp.where(jnp.isnan(operand), operand, gradient)


def _sum_taps(
    source: jax.Array,
    operand: jax.Array,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    **_: Any,
) -> jax.Array:
    """Adds up, tap by tap, the gradients of the windows that this tap has won."""
    ends = [(low, high, 0) for low, high in padding]
    padded = lax.pad(operand, jnp.array(-jnp.inf, operand.dtype), ends)
    # The sizes of the part of the array between the first and the last position of a tap.
    extents = list(map(dilated_size, source.shape, window_strides))
    taps = list(itertools.product(*map(range, window_dimensions)))
    views = []
    for tap in taps:
        limits = list(map(operator.add, tap, extents))
        views.append(lax.slice(padded, tap, limits, window_strides))
    winner = _find_winner(views)
    total = jnp.zeros(padded.shape, at_least_float32(operand).dtype)
    zero = jnp.zeros((), total.dtype)
    # The last tap of a number belongs to its first window, so this adds the first window first.
    for tap_number, tap in reversed(list(enumerate(taps))):
        won = jnp.where(winner == tap_number, at_least_float32(source), zero)
        pads = [
            (start, size - start - extent, stride - 1)
            for start, size, extent, stride in zip(
                tap, padded.shape, extents, window_strides, strict=True
            )
        ]
        total += lax.pad(won, zero, pads)
    total = lax.pad(total, zero, [(-low, -high, 0) for low, high in padding])
    return lax.convert_element_type(total, operand.dtype)


def _find_winner(views: Sequence[jax.Array]) -> jax.Array:
    """Returns the number of the tap that wins each window, given what each tap sees.

    The first tap is the winner until a tap comes that it is not >= to.
    """
    best, winner = views[0], jnp.zeros(views[0].shape, jnp.int32)
    for tap_number, value in enumerate(views[1:], start=1):
        # False if either is NaN, so a NaN replaces the winner and is replaced by the next tap.
        stays = best >= value
        best = jnp.where(stays, best, value)
        winner = jnp.where(stays, winner, tap_number)
    return winner


def _call_unfused(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
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
