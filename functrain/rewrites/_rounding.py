"""The point at which XLA's CPU backend rounds the result of a bfloat16 convolution.

XLA computes the convolution in float32. A consumer that converts the result to float32 gets the
unrounded numbers; all other consumers get rounded ones (the pass is named float-normalization).
`canonical_conv` writes a transpose after the convolution. If the conversion stayed behind that
transpose, its consumers would get rounded numbers too, so the pass moves it in front.
"""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import primitives

from functrain.rewrites._equations import avals, variables

_CONVOLUTION = primitives.conv_general_dilated_p
# Consumers that always get a rounded bfloat16 result, even through a transpose. Others are unknown:
# XLA inlines calls, and some functions, such as erf, convert their input before they compute.
_ROUNDED_CONSUMERS = {
    *("add", "add_any", "sub", "mul", "div", "neg", "max", "min", "select_n"),
    *("broadcast_in_dim", "concatenate", "pad", "reshape", "rev", "slice", "squeeze", "transpose"),
    *("conv_general_dilated", "dot_general", "reduce_max", "reduce_sum"),
}


def find_inexact(jaxpr: Any, *, is_apart: bool) -> set[Any]:
    """Returns the results that would have other bits if they were computed in another layout.

    Those are the results of bfloat16 convolutions whose consumers may see unrounded numbers.

    Args:
      jaxpr: A jaxpr of the function.
      is_apart: True in a loop or branch of the function. There XLA keeps the layouts of
        convolutions, and so its slow kernels, which order the sums in another way.
    """
    convolutions = [eqn for eqn in jaxpr.eqns if eqn.primitive is _CONVOLUTION]
    if is_apart:
        return {eqn.outvars[0] for eqn in convolutions}
    results = {
        eqn.outvars[0]
        for eqn in convolutions
        if all(aval.dtype == jnp.bfloat16 for aval in avals(eqn))
    }
    # The jaxpr may be a function that is called, so the consumers of its outputs are unknown.
    unrounded = results.intersection(variables(jaxpr.outvars))
    for eqn in jaxpr.eqns:
        if not is_float32_conversion(eqn) and eqn.primitive.name not in _ROUNDED_CONSUMERS:
            unrounded |= results.intersection(variables(eqn.invars))
    return unrounded


def is_float32_conversion(eqn: Any) -> bool:
    """Returns True if an equation converts bfloat16 to float32."""
    return (
        eqn.primitive is primitives.convert_element_type_p
        and eqn.invars[0].aval.dtype == jnp.bfloat16
        and eqn.params["new_dtype"] == jnp.float32
    )
