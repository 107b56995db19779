"""Ungrouped convolutions in the only layout that XLA's fast CPU kernels accept.

XLA brings convolutions into that layout (NHWC x HWIO -> NHWC) only in the entry computation. In the
body of a loop, such as a scan over steps, the gradients of a convolution keep layouts such as
``f01b_i01o->01bf`` and run in a naive kernel, 2 to 28 times slower
(https://github.com/jax-ml/jax/issues/12868, open as of jax 0.12). So this rewrite writes the
transposes out. The kernel and the order of its sums stay those outside of a loop, so no bit changes
in float16, bfloat16 (see `_rounding`), float32 and float64. In loops of the function itself bits
change, so there it is not exact.
"""

from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import canonical_numbers, from_canonical, to_canonical
from functrain.rewrites._equations import are_floats, avals, is_sharding_free, ndim
from functrain.rewrites._rewrite import Rewrite


def _applies(eqn: core.JaxprEqn) -> bool:
    params = eqn.params
    return (
        params["feature_group_count"] == params["batch_group_count"] == 1
        and params["dimension_numbers"] != canonical_numbers(ndim(eqn.invars[0]))
        and is_sharding_free(params)
    )


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    numbers = params["dimension_numbers"]
    lhs, rhs = to_canonical(lhs, rhs, numbers)
    params["dimension_numbers"] = canonical_numbers(lhs.ndim)
    out: jax.Array = primitives.conv_general_dilated_p.bind(lhs, rhs, **params)
    return from_canonical(out, numbers)


def _is_exact(eqn: core.JaxprEqn) -> bool:
    # If the operands have two dtypes, XLA converts them first and may not round the input.
    # 8-bit floats are rounded at varying points, too. Complex numbers have not been examined.
    return are_floats(*avals(eqn)) and len({aval.dtype for aval in avals(eqn)}) == 1


canonical_conv = Rewrite(
    name="canonical_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="the layout of XLA's fast kernels, in loops too",
    is_exact=_is_exact,
)
