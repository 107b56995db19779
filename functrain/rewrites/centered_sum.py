"""Sums of numbers minus their mean, which are zero.

The gradient of a variance, as in a normalization, contains such a sum: the gradient with respect to
the mean. It is zero but for rounding, and costs a reduction.

Estimated cycles of a step on a TPU v5e, in a program of 32 steps, jax 0.10.1:

    transformer of width 64, 16 texts of 64 tokens   388,678 -> 356,745
    vision transformer of width 64, batch of 32      1,168,604 -> 1,050,657

The sum that is left out would be the sum of rounding errors, so the gradient becomes more accurate.
If one of the numbers is not finite, the sum was NaN and is zero now.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import (
    are_floats,
    avals,
    find_producer,
    is_sharded,
    ndim,
    original_equation,
)
from functrain.rewrites._rewrite import Replacement, Rewrite

# Operations that only add or remove axes of length one, or repeat numbers along an axis.
_MOVES = (primitives.broadcast_in_dim_p, primitives.reshape_p)


def _applies(eqn: core.JaxprEqn) -> bool:
    operand, _ = avals(eqn)
    return are_floats(operand) and operand.ndim > 1 and not is_sharded(operand)


def _replace(eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> Replacement | None:
    total = original_equation(eqn, jaxpr)
    if not _is_centered(total.invars[0], total.params["axes"], jaxpr):
        return None
    _, result = avals(eqn)
    return Replacement(lambda: jnp.zeros(result.shape, result.dtype), ())


def _is_centered(atom: Any, axes: tuple[int, ...], jaxpr: core.Jaxpr) -> bool:
    """Returns True if an array is some numbers minus their mean over the axes, times a factor."""
    eqn = find_producer(atom, jaxpr)
    if eqn is None:
        return False
    if eqn.primitive is primitives.neg_p:
        return _is_centered(eqn.invars[0], axes, jaxpr)
    if eqn.primitive is primitives.mul_p:
        return any(
            _is_centered(x, axes, jaxpr) and _is_constant(factor, axes, jaxpr)
            for x, factor in (eqn.invars, eqn.invars[::-1])
        )
    return eqn.primitive is primitives.sub_p and _is_mean(eqn.invars[1], eqn.invars[0], axes, jaxpr)


def _is_constant(atom: Any, axes: tuple[int, ...], jaxpr: core.Jaxpr) -> bool:
    """Returns True if an array is the same along the axes."""
    if ndim(atom) == 0:
        return True
    eqn = find_producer(atom, jaxpr)
    if eqn is None or eqn.primitive is not primitives.broadcast_in_dim_p:
        return False
    sizes = zip(eqn.params["broadcast_dimensions"], avals(eqn)[0].shape, strict=True)
    return not any(size > 1 and axis in axes for axis, size in sizes)


def _is_mean(mean: Any, x: Any, axes: tuple[int, ...], jaxpr: core.Jaxpr) -> bool:
    """Returns True if an array is the mean of x over the axes, repeated along them."""
    quotient = _before_moves(mean, jaxpr)
    if not _is_constant(mean, axes, jaxpr) or quotient is None:
        return False
    if quotient.primitive is not primitives.div_p:
        return False
    total = _before_moves(quotient.invars[0], jaxpr)
    count = quotient.invars[1]
    return (
        total is not None
        and total.primitive is primitives.reduce_sum_p
        and total.invars[0] is x
        and total.params["axes"] == axes
        and isinstance(count, core.Literal)
        and count.val == math.prod(avals(total)[0].shape[axis] for axis in axes)
    )


def _before_moves(atom: Any, jaxpr: core.Jaxpr) -> core.JaxprEqn | None:
    """Returns the equation of the numbers of an array, whose axes may have been added later."""
    eqn = find_producer(atom, jaxpr)
    while eqn is not None and eqn.primitive in _MOVES:
        eqn = find_producer(eqn.invars[0], jaxpr)
    return eqn


centered_sum = Rewrite(
    name="centered_sum",
    primitive=primitives.reduce_sum_p,
    applies=_applies,
    replace_in_context=_replace,
    reason="the sum of numbers minus their mean is zero",
    platforms=("gpu", "tpu"),
)
