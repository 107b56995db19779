"""3-D convolutions by way of 2-D ones: as accurate, and of any layout."""

import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

from functrain.rewrites import optimize
from functrain.rewrites._equations import walk_equations
from functrain.rewrites.volume_conv import volume_conv

from . import cases

ANY_SIZE = mock.patch.multiple(
    importlib.import_module("functrain.rewrites.volume_conv"), MIN_PRODUCTS=0
)
LAYER = ((2, 4, 5, 6, 2), (3, 2, 3, 2, 4))


@cases.drawn(4)
@given(cases.convolutions(sides=(3, 3), ranks=(3,)))
def test_they_are_as_accurate_as_they_were(case: Any) -> None:
    conv, args = case
    with ANY_SIZE:
        cases.check_accuracy(cases.all_three(conv), args, volume_conv)


def test_no_3d_convolution_is_left_in_a_layer_and_its_gradients() -> None:
    conv, x, w = cases.layer(*LAYER)
    fn, g = cases.all_three(conv), jnp.ones(jax.eval_shape(conv, x, w).shape)
    with ANY_SIZE:
        after = jax.make_jaxpr(optimize(fn))(x, w, g)
        ranks = [len(e.params.get("window_strides", ())) for e, *_ in walk_equations(after)]
    assert max(ranks) == 2
    exact = jax.make_jaxpr(optimize(fn, "exact"))(x, w, g)
    assert max(len(e.params.get("window_strides", ())) for e, *_ in walk_equations(exact)) == 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_scan_of_steps_does_not_depend_on_its_length(dtype: Any) -> None:
    conv, x, w = cases.layer(*LAYER)
    with ANY_SIZE:
        cases.check_chunks(conv, x.astype(dtype), w.astype(dtype))


def test_the_size_decides() -> None:
    assert cases.takes(volume_conv, *cases.layer((8, 16, 16, 16, 8), (3, 3, 3, 8, 16))) == [True]
    assert cases.takes(volume_conv, *cases.layer((1, 4, 4, 4, 2), (3, 3, 3, 2, 2))) == [False]
    assert cases.takes(volume_conv, *cases.layer((8, 16, 16, 8), (3, 3, 8, 16))) == [False]
