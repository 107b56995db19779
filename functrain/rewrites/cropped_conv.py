"""Convolutions of an image without the part in front of it that their padding crops.

Up to jaxlib 0.11, XLA's CPU backend reads outside of the image if the padding along an axis is
negative in front and positive behind (https://github.com/openxla/xla/issues/48713). XLA also makes
such a padding itself: it adds a positive padding of the image to a negative one of the convolution.
A sliced image with no negative padding in front is convolved correctly, and XLA leaves it alone.

This rule is not one of `REWRITES`, since it makes nothing faster: `_compile` applies it to the
programs that are miscompiled.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from functrain.rewrites._rewrite import Rewrite
from functrain.rewrites._windows import dilated_size


def crop(
    lhs: jax.Array, axes: Sequence[int], params: dict[str, Any]
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns an image and the parameters of its convolution without negative padding in front.

    Args:
      lhs: The image.
      axes: The spatial axes of the image.
      params: The parameters of an equation; its dimension numbers are ignored.
    """
    padding = list(params["padding"])
    for i, (axis, dilation) in enumerate(zip(axes, params["lhs_dilation"], strict=True)):
        low, high = padding[i]
        if low >= 0:
            continue
        size = lhs.shape[axis]
        # Rounded up: if the padding ends between two pixels, the holes up to the next one stay.
        cut = -(low // dilation)
        if cut < size:
            padding[i] = (low + cut * dilation, high)
        else:
            padding[i] = (0, dilated_size(size, dilation) + low + high)
        lhs = lax.slice_in_dim(lhs, min(cut, size), None, axis=axis)
    return lhs, params | {"padding": tuple(padding)}


def _applies(eqn: core.JaxprEqn) -> bool:
    return any(low < 0 for low, _ in eqn.params["padding"])


def _replace(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    lhs, params = crop(lhs, params["dimension_numbers"].lhs_spec[2:], params)
    out: jax.Array = primitives.conv_general_dilated_p.bind(lhs, rhs, **params)
    return out


cropped_conv = Rewrite(
    name="cropped_conv",
    primitive=primitives.conv_general_dilated_p,
    applies=_applies,
    replace=_replace,
    reason="XLA reads outside of an image that its padding crops",
)
