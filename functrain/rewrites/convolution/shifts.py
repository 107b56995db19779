"""Convolutions as one product of the pixels with all taps, then shifted and added up."""

import functools
import itertools
import math
import operator
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from functrain.rewrites._windows import pad_spatial, strided_window
from functrain.rewrites.convolution._description import Convolution, padded_to_lanes
from functrain.rewrites.convolution._method import Convolve, Method

MAX_TAPS = 64
MAX_BYTES = 2**26


def _applies(conv: Convolution) -> bool:
    taps = math.prod(conv.window)
    pixels = conv.batch * math.prod(conv.image)
    return (
        not conv.is_grouped
        and 1 < taps <= MAX_TAPS
        and pixels * taps * conv.features <= MAX_BYTES // 4
    )


def _features(conv: Convolution) -> Mapping[str, float]:
    taps, pixels = math.prod(conv.window), conv.batch * math.prod(conv.image)
    positions = conv.batch * math.prod(conv.positions)
    products = pixels * taps * conv.features
    return {
        "calls": 1,
        "slices": taps,
        "products": conv.channels * pixels * taps * conv.features,
        "lanes": conv.channels * pixels * padded_to_lanes(taps * conv.features),
        "sums": positions * taps * conv.features,
        "segments": positions * taps,
        "intermediate": products,
        "large": products * (4 * products > 2**21),
        "kernel": taps * conv.channels * conv.features,
        "operands": pixels * conv.channels,
    }


def _lower(conv: Convolution, lhs: jax.Array, rhs: jax.Array, convolve: Convolve) -> jax.Array:
    """Multiplies pixels `[N S, I]` by all taps `[W O, I]`, then shifts and adds the products."""
    rows = lax.collapse(lhs, 0, lhs.ndim - 1)
    weights = lax.collapse(jnp.swapaxes(rhs, -2, -1), 0, rhs.ndim - 1)
    products = lax.dot_general(
        rows,
        weights,
        (((1,), (1,)), ((), ())),
        precision=conv.precision,
        preferred_element_type=conv.sum_dtype,
    ).reshape(*lhs.shape[:-1], -1)
    products = pad_spatial(products, conv.padding, conv.image_dilation)
    terms = []
    for number, tap in enumerate(itertools.product(*map(range, conv.window))):
        of_tap = lax.slice_in_dim(
            products, number * conv.features, (number + 1) * conv.features, axis=-1
        )
        terms.append(
            strided_window(of_tap, tap, conv.window_dilation, conv.positions, conv.strides)
        )
    return lax.convert_element_type(functools.reduce(operator.add, terms), conv.out_dtype)


shifts = Method("shifts", _applies, _features, _lower)
