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
from jax.extend.core import primitives
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


def groups_last(x: jax.Array, count: int) -> jax.Array:
    """`[..., G C] -> [..., C G]`."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], count, -1), -1, -2).reshape(x.shape)


class Sizes(NamedTuple):
    """The sizes of a convolution.

    Attributes:
      batch: N.
      image: S, without padding and holes.
      channels: C, or by group I.
      window: W, without holes.
      features: O.
      places: S', how many places the window has.
    """

    batch: int
    image: tuple[int, ...]
    channels: int
    window: tuple[int, ...]
    features: int
    places: tuple[int, ...]

    @property
    def products(self) -> int:
        """How many numbers are multiplied, those in padding and holes included."""
        sums = self.batch * math.prod(self.places) * self.features
        return sums * math.prod(self.window) * self.channels


def sizes(eqn: core.JaxprEqn) -> Sizes | None:
    """Returns the sizes of a convolution that may be computed in another way, None for any other.

    That is: real floats of 16 bits or more, and sizes that are known and not 0.
    """
    lhs, rhs, out = avals(eqn)
    numbers = eqn.params["dimension_numbers"]
    if not are_floats(lhs, rhs, out) or not sharding_is_free(eqn.params):
        return None
    if is_sharded(lhs, but=numbers.lhs_spec[0]) or is_sharded(rhs):
        return None
    if out.dtype.itemsize > max(4, lhs.dtype.itemsize):  # sums wider than what is summed
        return None
    batch, _, *image = (lhs.shape[axis] for axis in numbers.lhs_spec)
    features, inputs, *window = (rhs.shape[axis] for axis in numbers.rhs_spec)
    places = (out.shape[axis] for axis in numbers.out_spec[2:])
    return Sizes(batch, tuple(image), inputs, tuple(window), features, tuple(places))


def are_floats(*arrays: Any) -> bool:
    """Whether all are real floats of 16 bits or more, with sizes that are known and not 0."""
    return all(
        jnp.issubdtype(x.dtype, jnp.floating)
        and x.dtype.itemsize > 1
        and jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype  # else it cannot be made here
        and all(isinstance(size, int) and size > 0 for size in x.shape)
        for x in arrays
    )


def avals(eqn: core.JaxprEqn) -> list[Any]:
    """Returns the types of an equation's inputs and outputs: shapes and dtypes."""
    return [var.aval for var in (*eqn.invars, *eqn.outvars)]


def ungrouped(eqn: core.JaxprEqn) -> Sizes | None:
    """Returns the sizes of a convolution without groups, None for any other; as `sizes`."""
    params = eqn.params
    return sizes(eqn) if params["feature_group_count"] == params["batch_group_count"] == 1 else None


def conv(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Convolves operands in the canonical layout, without groups.

    Args:
      lhs: `[N, *S, C]`.
      rhs: `[*W, C, O]`.
      **params: Those of an equation; its groups and dimension numbers do not count.

    Returns:
      `[N, *S', O]`.
    """
    params |= {"feature_group_count": 1, "batch_group_count": 1}
    params |= {"dimension_numbers": canonical(lhs.ndim)}
    out: jax.Array = primitives.conv_general_dilated_p.bind(lhs, rhs, **params)
    return out


def is_of_weights(params: dict[str, Any]) -> bool:
    """Whether channels are where images were, as in the gradient of the weights."""
    batch, feature, *_ = params["dimension_numbers"].lhs_spec
    return bool(feature < batch)


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
    """Returns the groups of a convolution, None for one without; as `sizes`."""
    params, shape = eqn.params, sizes(eqn)
    by_batch = params["batch_group_count"] > 1
    count = params["batch_group_count"] if by_batch else params["feature_group_count"]
    if shape is None or count == 1:
        return None
    side = shape.batch // count if by_batch else shape.channels
    window = shape.places if by_batch else shape.window
    return Groups(count, by_batch, (side, shape.features // count), math.prod(window))


def is_sharded(x: Any, but: int | None = None) -> bool:
    """Whether the type of an array says that some axis is sharded, of those that are not `but`."""
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if sharding is not None else ()
    return any(name is not None for axis, name in enumerate(spec) if axis != but)


def sharding_is_free(params: dict[str, Any]) -> bool:
    """Whether no sharding is asked for. Inside shard_map one is given that says nothing."""
    sharding = params.get("out_sharding")
    return sharding is None or AxisType.Explicit not in sharding.mesh.axis_types


def ndim(var: Any) -> int:
    """Returns the number of axes of an equation's input or output."""
    return len(var.aval.shape)
