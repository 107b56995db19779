"""Convolutions with batch groups, such as gradients of grouped and depthwise weights.

XLA's CPU backend turns them into a convolution with one more dimension, along the groups, with
holes such that each group meets only its own weights. In the entry computation it brings that into
the layout of its fast kernels, but not in the body of a loop (see `canonical_conv`). This rewrite
writes the same convolution out: the kernel and the order of its sums stay those outside of a loop.
The issue is https://github.com/jax-ml/jax/issues/12868, open as of jax 0.12.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import conv, from_canonical, split_axis, to_canonical
from functrain.rewrites._equations import are_floats, avals, is_sharded, is_sharding_free
from functrain.rewrites._rewrite import Rewrite


def _applies(eqn: core.JaxprEqn) -> bool:
    # For other dtypes the last bits change, because XLA rounds at other points on the way.
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
        return _select_diagonal(conv(*to_canonical(lhs, rhs, numbers), **params), numbers)
    # Both operands get the groups as their last spatial axis: `[N / G, *S, G, C]` and
    # `[*W, G, C, O / G]`.
    n, c, *spatial = numbers.lhs_spec
    o, i, *window = numbers.rhs_spec
    lhs = _split(lhs, n, count, [(n, 1), *((axis, 0) for axis in spatial), (n, 0), (c, 0)])
    rhs = _split(rhs, o, count, [*((axis, 0) for axis in window), (o, 0), (i, 0), (o, 1)])
    # With G - 1 holes between the groups of lhs, and a stride of G - 1, each position of the
    # kernel sees one group, through the tap of the same group.
    group_axis = {"window_strides": count - 1, "lhs_dilation": count, "rhs_dilation": 1}
    params |= {name: (*params[name], value) for name, value in group_axis.items()}
    params["padding"] = (*params["padding"], (0, 0))
    out = conv(lhs, rhs, **params)  # [N / G, *S', G, O / G]
    n, o, *spatial = numbers.out_spec
    # Maps each axis of the result to the axes of `out` that it is made of.
    sources = {n: [0], o: [out.ndim - 2, out.ndim - 1]}
    sources |= {axis: [1 + j] for j, axis in enumerate(spatial)}
    axes = map(sources.__getitem__, range(out.ndim - 1))
    out = lax.transpose(out, tuple(itertools.chain(*axes)))
    return out.reshape(*out.shape[:o], -1, *out.shape[o + 2 :])


def _select_diagonal(out: jax.Array, numbers: lax.ConvDimensionNumbers) -> jax.Array:
    """Selects, from the results of all inputs with all weights, those of each with its own.

    XLA computes convolutions with one image per group in this way, too.
    """
    batch, feature = numbers.out_spec[:2]
    out = from_canonical(out, numbers)
    batch_index = lax.broadcasted_iota(jnp.int32, out.shape, batch)
    feature_index = lax.broadcasted_iota(jnp.int32, out.shape, feature)
    window = [1] * out.ndim
    window[batch] = out.shape[batch]
    zero = jnp.zeros((), out.dtype)
    diagonal = jnp.where(batch_index == feature_index, out, zero)
    summed: jax.Array = lax.reduce_window(diagonal, zero, lax.add, window, window, "VALID")
    return summed


def _split(x: jax.Array, axis: int, count: int, order: Sequence[tuple[int, int]]) -> jax.Array:
    """Splits an axis into `count` groups, then transposes.

    Args:
      x: The array.
      axis: The axis that is split into a part 0, the group, and a part 1, the index in the group.
      count: The number of groups.
      order: The new axes as pairs of an axis of `x` and a part; the part of other axes is 0.
    """
    x = split_axis(x, axis, count)
    return lax.transpose(x, [old + part + (old > axis) for old, part in order])


batch_groups = Rewrite(
    name="batch_groups",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="the convolution that XLA derives, in the layout of its fast kernels",
    is_exact=lambda eqn: True,
)
