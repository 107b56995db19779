"""Convolutions whose batch is in groups, such as the gradients of grouped and depthwise weights.

XLA's CPU backend makes of them a convolution of one dimension more, along the groups, with holes
that let each group meet its own weights only; and brings that into the layout of its fast kernels
in the entry computation, but not in a loop's body (see `canonical_conv`). Here it is written out:
the kernel and the order of its sums stay what they are outside a loop.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import (
    are_floats,
    avals,
    conv,
    from_canonical,
    is_sharded,
    is_sharding_free,
    to_canonical,
)
from functrain.rewrites._frame import Rewrite


def _applies(eqn: core.JaxprEqn) -> bool:
    # Of other dtypes last bits change: they are rounded elsewhere on the way.
    types = avals(eqn)
    return (
        eqn.params["batch_group_count"] > 1
        and are_floats(*types)
        and all(aval.dtype == jnp.float32 for aval in types)
        and is_sharding_free(eqn.params)
        and not any(map(is_sharded, types))
    )


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    count, numbers = params["batch_group_count"], params["dimension_numbers"]
    if lhs.shape[numbers.lhs_spec[0]] == rhs.shape[numbers.rhs_spec[0]] == count:
        return _diagonal(conv(*to_canonical(lhs, rhs, numbers), **params), numbers)
    n, c, *spatial = numbers.lhs_spec
    o, i, *window = numbers.rhs_spec
    lhs = _split(lhs, n, count, [(n, 1), *((axis, 0) for axis in spatial), (n, 0), (c, 0)])
    rhs = _split(rhs, o, count, [*((axis, 0) for axis in window), (o, 0), (i, 0), (o, 1)])
    along = {"window_strides": count - 1, "lhs_dilation": count, "rhs_dilation": 1}
    params |= {name: (*params[name], value) for name, value in along.items()}
    params["padding"] = (*params["padding"], (0, 0))
    out = conv(lhs, rhs, **params)  # [N / G, *S', G, O / G]
    n, o, *spatial = numbers.out_spec
    where = {n: [0], o: [out.ndim - 2, out.ndim - 1]}
    where |= {axis: [1 + j] for j, axis in enumerate(spatial)}
    out = lax.transpose(out, [axis for at in range(out.ndim - 1) for axis in where[at]])
    return out.reshape(*out.shape[:o], -1, *out.shape[o + 2 :])


def _diagonal(out: jax.Array, numbers: lax.ConvDimensionNumbers) -> jax.Array:
    """Keeps, of all inputs with all weights, each one with its own: what XLA does, too."""
    batch, feature = numbers.out_spec[:2]
    out = from_canonical(out, numbers)
    own = lax.broadcasted_iota(jnp.int32, out.shape, batch) == lax.broadcasted_iota(
        jnp.int32, out.shape, feature
    )
    window = [size if axis == batch else 1 for axis, size in enumerate(out.shape)]
    zero = jnp.zeros((), out.dtype)
    kept: jax.Array = lax.reduce_window(
        jnp.where(own, out, zero), zero, lax.add, window, window, "VALID"
    )
    return kept


def _split(x: jax.Array, at: int, count: int, order: Sequence[tuple[int, int]]) -> jax.Array:
    """Splits an axis into `count` groups, and transposes to an order of (axis, part of it)."""
    x = x.reshape(*x.shape[:at], count, -1, *x.shape[at + 1 :])
    return lax.transpose(x, [axis + part + (axis > at) for axis, part in order])


batch_groups = Rewrite(
    name="batch_groups",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="what XLA makes of it, in the layout of its fast kernels",
    is_exact=lambda eqn: True,
)
