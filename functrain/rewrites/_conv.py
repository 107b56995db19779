"""What the convolution rewrites share: one layout, and parameters read once.

Shapes are in the canonical layout: lhs `[N, *S, C]`, rhs `[*W, I, O]`, result `[N, *S', O]`, with
I the channels that are summed over.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import AxisType


def canonical(ndim: int) -> lax.ConvDimensionNumbers:
    """Returns the dimension numbers of `[N, *S, C]` x `[*W, I, O]` -> `[N, *S', O]`."""
    spatial = tuple(range(1, ndim - 1))
    data = (0, ndim - 1, *spatial)
    return lax.ConvDimensionNumbers(data, (ndim - 1, ndim - 2, *range(ndim - 2)), data)


def to_canonical(
    lhs: jax.Array, rhs: jax.Array, numbers: lax.ConvDimensionNumbers
) -> tuple[jax.Array, jax.Array]:
    """Transposes both operands to the canonical layout."""
    batch, feature, *spatial = numbers.lhs_spec
    out, into, *window = numbers.rhs_spec
    return lax.transpose(lhs, (batch, *spatial, feature)), lax.transpose(rhs, (*window, into, out))


def from_canonical(out: jax.Array, numbers: lax.ConvDimensionNumbers) -> jax.Array:
    """Transposes a canonical result to where the dimension numbers want it."""
    batch, feature, *spatial = numbers.out_spec
    wanted = (batch, *spatial, feature)
    return lax.transpose(out, [wanted.index(axis) for axis in range(out.ndim)])


class Groups(NamedTuple):
    """The sizes of a grouped convolution that decide what it becomes.

    Attributes:
      number: G. lhs is `[N, *S, G I]` and rhs `[*W, I, G O]`; by batch lhs is `[G N, *S, I]`.
      by_batch: Whether the batch is in groups, as in the gradient of the weights, or the features.
      sides: The two sizes that a group multiplies at each tap: `(I, O)`, or by batch `(N, O)`.
      taps: The products that make a sum of shifts: `prod(W)`, or by batch `prod(S')`.
    """

    number: int
    by_batch: bool
    sides: tuple[int, int]
    taps: int


def groups(eqn: core.JaxprEqn) -> Groups | None:
    """Returns the groups of a convolution that may be rewritten, None for any other.

    That is: grouped, real floats of 16 bits or more, sizes that are known and not 0.
    """
    lhs, rhs, out = (_aval(var) for var in (*eqn.invars, *eqn.outvars))
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    by_batch = params["batch_group_count"] > 1
    count = params["batch_group_count"] if by_batch else params["feature_group_count"]
    sizes = (*lhs.shape, *rhs.shape, *out.shape)
    if (
        count == 1
        or not all(isinstance(size, int) and size > 0 for size in sizes)
        or not jnp.issubdtype(lhs.dtype, jnp.floating)
        or lhs.dtype.itemsize < 2
        or not sharding_is_free(params)
    ):
        return None
    side = lhs.shape[numbers.lhs_spec[0]] // count if by_batch else rhs.shape[numbers.rhs_spec[1]]
    sides = side, rhs.shape[numbers.rhs_spec[0]] // count
    window = (
        [out.shape[a] for a in numbers.out_spec[2:]]
        if by_batch
        else [rhs.shape[a] for a in numbers.rhs_spec[2:]]
    )
    return Groups(count, by_batch, sides, math.prod(window))


def sharding_is_free(params: dict[str, Any]) -> bool:
    """Whether no sharding is asked for. Inside shard_map one is given that says nothing."""
    sharding = params.get("out_sharding")
    return sharding is None or AxisType.Explicit not in sharding.mesh.axis_types


def ndim(var: Any) -> int:
    """Returns the number of axes of an equation's input or output."""
    return len(_aval(var).shape)


def _aval(var: Any) -> Any:
    return var.aval  # an array's; jax types it as any abstract value
