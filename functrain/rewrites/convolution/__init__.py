"""Convolutions on CPUs, each computed by the method with the lowest estimated time."""

from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites.convolution import reductions, xla
from functrain.rewrites.convolution._description import (
    bind,
    describe,
    from_canonical,
    is_rewritable,
    to_canonical,
)
from functrain.rewrites.convolution._plan import all_plans, best_plan

__all__ = ["convolution", "swapped_conv"]


def _applies(eqn: core.JaxprEqn) -> bool:
    if not is_rewritable(eqn):
        return False
    plan = best_plan(describe(*(var.aval for var in eqn.invars), eqn.params))
    # `canonical_conv` brings XLA's kernel into the layout in which it is fast.
    return plan is not None and plan.method is not xla.xla


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    conv = describe(lhs, rhs, params)
    plan, numbers = best_plan(conv), params["dimension_numbers"]
    assert plan is not None
    return from_canonical(plan.lower(conv, *to_canonical(lhs, rhs, numbers)), numbers)


def _explain(eqn: core.JaxprEqn) -> str:
    """Returns the plan, and the next two by their estimates."""
    conv = describe(*(var.aval for var in eqn.invars), eqn.params)
    chosen, runners_up = best_plan(conv), []
    assert chosen is not None
    for plan in all_plans(conv):
        if plan.name != chosen.name:
            runners_up.append(f"{plan.name} {plan.seconds * 1e6:,.0f}")
    others = f"; next {', '.join(runners_up[:2])}" if runners_up else ""
    return f"{chosen.name}, estimated at {chosen.seconds * 1e6:,.0f} µs{others}"


convolution = Rewrite(
    name="convolution",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    explain=_explain,
)


def _is_swappable(eqn: core.JaxprEqn) -> bool:
    if not is_rewritable(eqn):
        return False
    return reductions.swapped.applies(describe(*(var.aval for var in eqn.invars), eqn.params))


def _replace_swapped(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    conv, numbers = describe(lhs, rhs, params), params["dimension_numbers"]
    operands = to_canonical(lhs, rhs, numbers)
    out = reductions.swapped.lower(conv, *operands, bind)
    return from_canonical(out, numbers)


# On a TPU v5e, XLA reverses the image in memory instead: by the estimate of its compiler, the step
# of the DCGAN in `examples/dcgan.py` takes 1,192,675 cycles with the swap and 1,401,988 without.
swapped_conv = Rewrite(
    name="swapped_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_is_swappable,
    replace=_replace_swapped,
    reason="holes in the kernel cost less than holes in the image",
    platforms=("tpu",),
)
