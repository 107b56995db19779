"""When a convolution of bfloat16 is rounded: a fact of XLA's CPU backend.

XLA computes it in float32, and rounds the result for those only who want bfloat16: who converts it
to float32 next gets it unrounded (its pass is named float-normalization). With a transpose in
between, as `canonical_conv` writes one, it would be rounded for all; so the conversion goes first.
"""

from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

# Readers of a bfloat16 result that get it rounded, whatever lies between. Of others nobody knows
# here: calls, which XLA takes apart, and functions that convert before they compute, as erf does.
_GET_IT_ROUNDED = {
    *("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "select_n"),
    *("broadcast_in_dim", "concatenate", "pad", "reshape", "rev", "slice", "squeeze", "transpose"),
    *("conv_general_dilated", "dot_general", "reduce_max", "reduce_sum"),
}


def perhaps_unrounded(jaxpr: Any) -> set[Any]:
    """Returns the results of narrow convolutions of which nobody knows here who gets them rounded.

    What a jaxpr returns is among them: it may be that of a function which is called.
    """
    narrow = {eqn.outvars[0] for eqn in jaxpr.eqns if _is_narrow(eqn)}
    if not narrow:
        return narrow
    unknown = narrow.intersection(_variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        if not is_widening(eqn) and eqn.primitive.name not in _GET_IT_ROUNDED:
            unknown |= narrow.intersection(_variables(eqn.invars))
    return unknown


def is_widening(eqn: Any) -> bool:
    """Whether an equation converts bfloat16 to float32."""
    return (
        eqn.primitive is primitives.convert_element_type_p
        and eqn.invars[0].aval.dtype == jnp.bfloat16
        and eqn.params["new_dtype"] == jnp.float32
    )


def _is_narrow(eqn: Any) -> bool:
    return eqn.primitive is primitives.conv_general_dilated_p and all(
        var.aval.dtype == jnp.bfloat16 for var in (*eqn.invars, *eqn.outvars)
    )


def _variables(atoms: Any) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]
