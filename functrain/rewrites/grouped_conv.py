"""Grouped convolutions as a loop over the groups, of ungrouped ones in the canonical layout.

TABLE
"""

from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._conv import canonical, from_canonical, groups, to_canonical
from functrain.rewrites._frame import Rewrite


def _applies(eqn: core.JaxprEqn) -> bool:
    shape = groups(eqn)
    return shape is not None and min(shape.sides) > 1


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    numbers = params["dimension_numbers"]
    lhs, rhs = to_canonical(lhs, rhs, numbers)
    count = max(params["feature_group_count"], params["batch_group_count"])
    grouped_axis = lhs.ndim - 1 if params["feature_group_count"] > 1 else 0
    params |= {"feature_group_count": 1, "batch_group_count": 1}
    params |= {"dimension_numbers": canonical(lhs.ndim)}

    def one(carry: tuple[()], group: tuple[jax.Array, jax.Array]) -> tuple[tuple[()], jax.Array]:
        return carry, primitives.conv_general_dilated_p.bind(*group, **params)

    # [G, N, *S, I], [G, *W, I, O] -> [G, N, *S', O]; written out they would cost 10 ms each to
    # compile, and run no faster.
    xs = _lead(lhs, grouped_axis, count), _lead(rhs, rhs.ndim - 1, count)
    _, out = lax.scan(one, (), xs)
    out = lax.transpose(out, (*range(1, out.ndim - 1), 0, out.ndim - 1))
    return from_canonical(lax.collapse(out, out.ndim - 2), numbers)


def _lead(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Splits an axis in groups, and puts the axis that counts them first."""
    shape = (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    others = [i for i in range(len(shape)) if i != axis]
    return lax.transpose(lax.reshape(x, shape), (axis, *others))


grouped_conv = Rewrite(
    name="grouped_conv",
    primitive=primitives.conv_general_dilated_p,
    exact=False,
    applies=_applies,
    replace=_replace,
)
