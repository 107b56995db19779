"""A way to compute a convolution."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from functrain.rewrites.convolution._description import Convolution

# Convolves `lhs` and `rhs` as the plan of the description says.
Convolve = Callable[[Convolution, jax.Array, jax.Array], jax.Array]


class Method(NamedTuple):
    """A way to compute a convolution: a kernel, or a reduction to other convolutions.

    Attributes:
      name: The name in plans, and of the weights in `weights.json`.
      applies: Returns True if the method can compute a convolution.
      features: Returns the quantities that the time depends on, such as the number of products.
        The estimate is their sum, weighted by `weights.json`, without the time of the parts.
      lower: ``(conv, lhs, rhs, convolve) -> result``, all in the canonical layout. `convolve`
        computes the parts.
      parts: Returns the other convolutions that the method needs, each with how often.
    """

    name: str
    applies: Callable[[Convolution], bool]
    features: Callable[[Convolution], Mapping[str, float]]
    lower: Callable[[Convolution, jax.Array, jax.Array, Convolve], jax.Array]
    parts: Callable[[Convolution], list[tuple[Convolution, int]]] = lambda conv: []
