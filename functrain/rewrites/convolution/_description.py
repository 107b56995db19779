"""The description of a convolution, from which a plan is made.

All arrays are in the canonical layout: lhs `[N, *S, C]`, rhs `[*W, I, O]`, result `[N, *P, O]`.
I is the number of channels that are summed over: C, or C / G with G groups of features.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._equations import are_floats, avals, is_sharded, is_sharding_free


class Convolution(NamedTuple):
    """Sizes and options of a convolution.

    Attributes:
      batch: N.
      image: S, without padding and holes.
      channels: I, the channels that are summed over.
      window: W, the taps along each axis.
      features: O.
      padding: Elements in front of and behind each axis; negative numbers crop.
      strides: The distance between two positions of the window.
      image_dilation: The distance between two pixels of the image (`lhs_dilation`).
      window_dilation: The distance between two taps of the window (`rhs_dilation`).
      groups: G, the groups of features.
      batch_groups: The groups of the batch, as in gradients of the weights of grouped layers.
      dtype: The dtype of the operands.
      out_dtype: The dtype of the result.
      precision: As in `lax.conv_general_dilated`.
      is_batch_last: True if lhs lies as `[C, *S, N]` in memory, as in gradients of weights.
      is_kernel_transposed: True if rhs lies as `[*W, O, I]`, as in gradients of layers' inputs.
    """

    batch: int
    image: tuple[int, ...]
    channels: int
    window: tuple[int, ...]
    features: int
    padding: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]
    image_dilation: tuple[int, ...]
    window_dilation: tuple[int, ...]
    groups: int = 1
    batch_groups: int = 1
    dtype: Any = jnp.dtype("float32")
    out_dtype: Any = jnp.dtype("float32")
    precision: Any = None
    is_batch_last: bool = False
    is_kernel_transposed: bool = False

    @property
    def positions(self) -> tuple[int, ...]:
        """Returns P, the positions of the window along each axis."""
        positions = []
        for size, (low, high), taps, stride, image_dilation, window_dilation in zip(
            *(self.image, self.padding, self.window),
            *(self.strides, self.image_dilation, self.window_dilation),
            strict=True,
        ):
            padded = dilated_size(size, image_dilation) + low + high
            positions.append((padded - dilated_size(taps, window_dilation)) // stride + 1)
        return tuple(positions)

    @property
    def products(self) -> int:
        """Returns the number of multiplications, including those with padding and holes."""
        sums = self.batch * math.prod(self.positions) * self.features
        return sums * math.prod(self.window) * self.channels

    @property
    def sum_dtype(self) -> Any:
        """Returns the dtype in which products are summed: at least float32."""
        return jnp.promote_types(self.out_dtype, jnp.float32)

    @property
    def has_holes(self) -> bool:
        """Returns True if there are holes between the pixels of the image."""
        return math.prod(self.image_dilation) > 1

    @property
    def overhangs(self) -> bool:
        """Returns True if the padding is wider than the window, as in gradients of VALID layers."""
        return any(
            low + high > (taps - 1) * dilation
            for (low, high), taps, dilation in zip(
                self.padding, self.window, self.window_dilation, strict=True
            )
        )

    @property
    def is_grouped(self) -> bool:
        """Returns True if the features or the batch are grouped."""
        return self.groups * self.batch_groups > 1


def describe(lhs: Any, rhs: Any, params: Mapping[str, Any]) -> Convolution:
    """Returns the description of a convolution.

    Args:
      lhs: The image, or its type.
      rhs: The kernel, or its type.
      params: The parameters of the equation.
    """
    numbers = params["dimension_numbers"]
    batch, _, *image = map(lhs.shape.__getitem__, numbers.lhs_spec)
    features, channels, *window = map(rhs.shape.__getitem__, numbers.rhs_spec)
    return Convolution(
        batch,
        tuple(image),
        channels,
        tuple(window),
        features,
        tuple(map(tuple, params["padding"])),
        *(tuple(params[name]) for name in ("window_strides", "lhs_dilation", "rhs_dilation")),
        groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
        dtype=lhs.dtype,
        out_dtype=jnp.dtype(params["preferred_element_type"] or lhs.dtype),
        precision=params["precision"],
        is_batch_last=numbers.lhs_spec[1] < numbers.lhs_spec[0],
        is_kernel_transposed=numbers.rhs_spec[0] < numbers.rhs_spec[1],
    )


def is_rewritable(eqn: core.JaxprEqn) -> bool:
    """Returns True if a convolution may be computed by other methods.

    It may if it is of real floats of 16 bits or more, with sizes that are known and positive, and
    without sharding except that of the batch.
    """
    lhs, rhs, out = avals(eqn)
    return (
        are_floats(lhs, rhs, out)
        and lhs.dtype == rhs.dtype
        and is_sharding_free(eqn.params)
        and not is_sharded(lhs, except_axis=eqn.params["dimension_numbers"].lhs_spec[0])
        and not is_sharded(rhs)
        # The sums are computed in float32, or in the dtype of the operands if that is wider.
        and out.dtype.itemsize <= max(4, lhs.dtype.itemsize)
    )


def bind(conv: Convolution, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Convolves operands in the canonical layout as XLA does."""
    out: jax.Array = primitives.conv_general_dilated_p.bind(
        lhs,
        rhs,
        window_strides=conv.strides,
        padding=conv.padding,
        lhs_dilation=conv.image_dilation,
        rhs_dilation=conv.window_dilation,
        dimension_numbers=canonical_numbers(lhs.ndim),
        feature_group_count=conv.groups,
        batch_group_count=conv.batch_groups,
        precision=conv.precision,
        preferred_element_type=None if conv.out_dtype == conv.dtype else conv.out_dtype,
        out_sharding=None,
    )
    return out


def convolve_ungrouped(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Convolves operands in the canonical layout, without groups, as XLA does.

    The groups and dimension numbers in `params`, the parameters of an equation, are ignored.
    """
    params |= {"feature_group_count": 1, "batch_group_count": 1}
    params |= {"dimension_numbers": canonical_numbers(lhs.ndim)}
    return bind(describe(lhs, rhs, params), lhs, rhs)


def canonical_numbers(ndim: int) -> lax.ConvDimensionNumbers:
    """Returns the dimension numbers of `[N, *S, C]` x `[*W, I, O]` -> `[N, *P, O]`."""
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
    """Transposes a canonical result to the layout that the dimension numbers specify."""
    batch, feature, *spatial = numbers.out_spec
    target_axes = (batch, *spatial, feature)
    return lax.transpose(out, list(map(target_axes.index, range(out.ndim))))


def dilated_size(size: int, dilation: int) -> int:
    """Returns the size of an axis after its elements are moved `dilation` apart."""
    return (size - 1) * dilation + 1


def padded_to_lanes(features: int) -> int:
    """Returns the number of features that take the time of `features`: registers hold 4."""
    return 4 * -(-features // 4)
