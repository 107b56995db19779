"""Gradients of ReLU and of a bias in front of max pooling, taken before pooling spreads them.

The gradient of max pooling gives each number to the largest number of a window. ReLU in front of it
then keeps the numbers whose input was above zero, and a bias in front of that gets their sum. All
of this can be decided for each window: the largest number of a window is above zero if the result
of pooling is. There are four or nine times as many inputs as windows.

Estimated cycles of a step of a convnet on a TPU v5e, in a program of 32 steps, jax 0.10.1:

    3 x 3 to 32 and 64 features, 2 x 2 pooling, batch of 32   223,392 -> 82,920

ReLU's gradient is the same. The sum is computed in another order.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import (
    are_floats,
    avals,
    find_producer,
    is_sharded,
    is_zero,
    ndim,
    original_equation,
)
from functrain.rewrites._rewrite import Replacement, Rewrite
from functrain.rewrites.max_pool_gradient import does_every_window_see_numbers


def _selects(eqn: core.JaxprEqn) -> bool:
    (result,) = eqn.outvars
    return len(eqn.invars) == 3 and are_floats(result.aval) and not is_sharded(result.aval)


def _mask_windows(eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> Replacement | None:
    select = original_equation(eqn, jaxpr)
    mask, zeros, spread = (find_producer(atom, jaxpr) for atom in select.invars)
    if mask is None or zeros is None or spread is None:
        return None
    is_gradient = (
        mask.primitive is primitives.gt_p
        and is_zero(mask.invars[1])
        and zeros.primitive is primitives.broadcast_in_dim_p
        and is_zero(zeros.invars[0])
        and _spreads_to_maxima(spread)
    )
    if not is_gradient:
        return None
    source, operand = spread.invars
    relu = find_producer(operand, jaxpr)
    is_of_relu = (
        relu is not None
        and relu.primitive is primitives.max_p
        and relu.invars[0] is mask.invars[0]
        and is_zero(relu.invars[1])
    )
    pooled = _find_pooled(spread, select, jaxpr) if is_of_relu else None
    if pooled is None:
        return None

    def spread_masked(source: jax.Array, operand: jax.Array, pooled: jax.Array) -> jax.Array:
        masked = jnp.where(pooled > 0, source, jnp.zeros_like(source))
        result: jax.Array = spread.primitive.bind(masked, operand, **spread.params)
        return result

    return Replacement(spread_masked, [source, operand, pooled])


def _spreads_to_maxima(eqn: core.JaxprEqn) -> bool:
    is_scatter = eqn.primitive is primitives.select_and_scatter_add_p
    return is_scatter and eqn.params["select_prim"] is primitives.ge_p


def _find_pooled(spread: core.JaxprEqn, select: core.JaxprEqn, jaxpr: core.Jaxpr) -> Any:
    """Returns the variable of the max pooling whose gradient is spread, or None.

    It must be computed before the selection, to be an input of what replaces that.
    """
    names = ("window_dimensions", "window_strides", "padding")
    for eqn in itertools.takewhile(lambda eqn: eqn is not select, jaxpr.eqns):
        if (
            eqn.primitive is primitives.reduce_window_max_p
            and eqn.invars[0] is spread.invars[1]
            and all(eqn.params[name] == spread.params[name] for name in names)
            and {*eqn.params["base_dilation"], *eqn.params["window_dilation"]} == {1}
        ):
            return eqn.outvars[0]
    return None


def _sums_positions(eqn: core.JaxprEqn) -> bool:
    operand, _ = avals(eqn)
    return are_floats(operand) and operand.ndim > 2 and not is_sharded(operand)


def _sum_windows(eqn: core.JaxprEqn, jaxpr: core.Jaxpr) -> Replacement | None:
    total = original_equation(eqn, jaxpr)
    spread = find_producer(total.invars[0], jaxpr)
    if spread is None or not _spreads_to_maxima(spread):
        return None
    axes, params = total.params["axes"], spread.params
    by_axis = (params["window_dimensions"], params["window_strides"], params["padding"])
    kept = set(range(ndim(total.invars[0]))).difference(axes)
    # A number may move within its window, so windows must lie within the axes that are summed.
    is_per_element = all(
        (taps, stride, ends) == (1, 1, (0, 0))
        for axis, (taps, stride, ends) in enumerate(zip(*by_axis, strict=True))
        if axis in kept
    )
    # The number of a window that sees nothing but padding is in no sum.
    if not is_per_element or not does_every_window_see_numbers(params):
        return None
    return Replacement(lambda source: jnp.sum(source, axis=axes), spread.invars[:1])


relu_before_pooling = Rewrite(
    name="relu_before_pooling",
    primitive=primitives.select_n_p,
    applies=_selects,
    replace_in_context=_mask_windows,
    reason="one comparison for each window instead of each number in it",
    platforms=("tpu",),
)
bias_before_pooling = Rewrite(
    name="bias_before_pooling",
    primitive=primitives.reduce_sum_p,
    applies=_sums_positions,
    replace_in_context=_sum_windows,
    reason="a window has one gradient, and several numbers to which it may go",
    platforms=("tpu",),
)
