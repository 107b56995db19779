"""Ungrouped convolutions in the one layout that XLA's fast CPU kernels take.

XLA brings convolutions into that layout (NHWC x HWIO -> NHWC) in the entry computation only. In a
loop's body, which is what a scan makes of a step, the gradients of a convolution keep layouts such
as ``f01b_i01o->01bf`` and fall to a naive loop, 2-17 times slower
(https://github.com/jax-ml/jax/issues/12868, open as of jax 0.12). So the transposes are written
out. The kernel and the order of its sums stay what they are outside a loop: no bit changes, in
float16, bfloat16 (see `_rounding`), float32 and float64.
"""

from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import (
    are_floats,
    avals,
    canonical_numbers,
    from_canonical,
    is_sharding_free,
    ndim,
    to_canonical,
)
from functrain.rewrites._frame import Rewrite


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
    # Where two dtypes meet, XLA converts the operands first, and perhaps does not round what comes
    # in. Floats of 8 bits are rounded here or there, too; complex ones were not looked at.
    return are_floats(*avals(eqn)) and len({aval.dtype for aval in avals(eqn)}) == 1


canonical_conv = Rewrite(
    name="canonical_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="the layout of XLA's fast kernels, in loops too",
    is_exact=_is_exact,
)
