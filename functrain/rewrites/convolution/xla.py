"""XLA's own kernel, in the layout in which it is fast.

XLA brings convolutions into that layout (NHWC x HWIO -> NHWC) only in the entry computation. In the
body of a loop, such as a scan over steps, the gradients of a convolution keep layouts such as
``f01b_i01o->01bf`` and run in a naive kernel, 2 to 17 times slower
(https://github.com/jax-ml/jax/issues/12868, open as of jax 0.12).
"""

import math
from collections.abc import Mapping

from functrain.rewrites.convolution._description import Convolution, bind, padded_to_lanes
from functrain.rewrites.convolution._method import Method


def _features(conv: Convolution) -> Mapping[str, float]:
    pixels, taps = math.prod(conv.image), math.prod(conv.window)
    positions = conv.batch * math.prod(conv.positions)
    terms = taps * conv.channels
    products = positions * terms * conv.features
    lanes = positions * terms * padded_to_lanes(conv.features // conv.groups) * conv.groups
    return {
        "calls": 1,
        "products": products,
        "lanes": lanes,
        "serial": lanes * (positions * conv.features < 2**15),
        "patches": positions * terms * conv.groups,
        "odd": positions * terms * conv.groups * (conv.channels % 4 != 0),
        "overhang": positions * terms * conv.overhangs,
        "segments": positions * taps * conv.groups,
        "operands": conv.batch * pixels * conv.channels * conv.groups + terms * conv.features,
        "results": positions * conv.features,
        "scattered": conv.batch * pixels * taps * conv.features * conv.has_holes,
    }


xla = Method(
    name="xla",
    applies=lambda conv: conv.batch_groups == 1,
    features=_features,
    lower=lambda conv, lhs, rhs, convolve: bind(conv, lhs, rhs),
)
