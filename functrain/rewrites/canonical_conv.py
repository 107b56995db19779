"""Convolutions in the only layout that XLA's fast CPU kernels accept.

XLA brings convolutions into that layout (NHWC x HWIO -> NHWC) only in the entry computation. In the
body of a loop, such as a scan over steps, the gradients of a convolution keep layouts such as
``f01b_i01o->01bf`` and run in a naive kernel, 2 to 28 times slower
(https://github.com/jax-ml/jax/issues/12868, open as of jax 0.12). So `canonical_conv` writes the
transposes out. The kernel and the order of its sums stay those outside of a loop, so no bit changes
in float16, bfloat16 (see `_rounding`), float32 and float64. In loops of the function itself bits
change, so there it is not exact.

XLA turns a convolution with batch groups, such as the gradient of grouped and depthwise weights,
into one with one more dimension, along the groups, with holes such that each group meets only its
own weights. `batch_groups` writes the same convolution out, in the canonical layout.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from functrain.rewrites._conv import canonical_numbers, canonical_rewrite, conv, split_axis
from functrain.rewrites._equations import are_floats, avals, is_sharded, is_sharding_free, ndim


def _applies(eqn: JaxprEqn) -> bool:
    params = eqn.params
    return (
        params["feature_group_count"] == params["batch_group_count"] == 1
        and params["dimension_numbers"] != canonical_numbers(ndim(eqn.invars[0]))
        and is_sharding_free(params)
    )


def _is_exact(eqn: JaxprEqn) -> bool:
    # If the operands have two dtypes, XLA converts them first and may not round the input.
    # 8-bit floats are rounded at varying points, too. Complex numbers have not been examined.
    return are_floats(*avals(eqn)) and len({aval.dtype for aval in avals(eqn)}) == 1


@canonical_rewrite(_applies, "the layout of XLA's fast kernels, in loops too", is_exact=_is_exact)
def canonical_conv(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Convolves in the canonical layout."""
    return conv(lhs, rhs, **params)


def _has_groups_of_floats(eqn: JaxprEqn) -> bool:
    # For other dtypes the last bits change, because XLA rounds at other points on the way.
    types = avals(eqn)
    return (
        eqn.params["batch_group_count"] > 1
        and are_floats(*types)
        and all(aval.dtype == jnp.float32 for aval in types)
        and is_sharding_free(eqn.params)
        and not any(map(is_sharded, types))
    )


@canonical_rewrite(
    _has_groups_of_floats,
    "the convolution that XLA derives, in the layout of its fast kernels",
    is_exact=lambda eqn: True,
)
def batch_groups(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Makes the groups an axis of the image, as XLA does."""
    count = params["batch_group_count"]
    if len(lhs) == rhs.shape[-1] == count:
        return _select_diagonal(conv(lhs, rhs, **params))
    # The groups are the last spatial axis: `[N / G, *S, G, C]` and `[*W, G, C, O / G]`.
    lhs = jnp.moveaxis(split_axis(lhs, 0, count), 0, -2)
    rhs = jnp.moveaxis(split_axis(rhs, rhs.ndim - 1, count), -2, -3)
    # With G - 1 holes between the groups of lhs, and a stride of G - 1, each position of the
    # kernel sees one group, through the tap of the same group.
    group_axis = {"window_strides": count - 1, "lhs_dilation": count, "rhs_dilation": 1}
    params |= {name: (*params[name], value) for name, value in group_axis.items()}
    params["padding"] = (*params["padding"], (0, 0))
    out = conv(lhs, rhs, **params)  # [N / G, *S', G, O / G]
    return lax.collapse(out, out.ndim - 2)


def _select_diagonal(out: jax.Array) -> jax.Array:
    """Selects, from the results of all inputs with all weights, those of each with its own.

    XLA computes convolutions with one image per group in this way, too.
    """
    batch_index = lax.broadcasted_iota(jnp.int32, out.shape, 0)
    feature_index = lax.broadcasted_iota(jnp.int32, out.shape, out.ndim - 1)
    zero = jnp.zeros((), out.dtype)
    window = (len(out), *[1] * (out.ndim - 1))
    diagonal = jnp.where(batch_index == feature_index, out, zero)
    summed: jax.Array = lax.reduce_window(diagonal, zero, lax.add, window, window, "VALID")
    return summed
