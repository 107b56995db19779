"""Transposed convolutions, in phases and with swapped roles: as accurate, in fewer products."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

from functrain.rewrites import optimize, phased_conv, swapped_conv
from functrain.rewrites._equations import walk_equations

from . import cases

PHASED, SWAPPED = phased_conv.phased_conv, swapped_conv.swapped_conv
ANY_SIZE = mock.patch.object(phased_conv, "MIN_FEATURES", 0)


def layer(n: int, size: int, channels: int, taps: int, features: int, holes: int = 2) -> Any:
    """As Keras's Conv2DTranspose has it, with padding "same"."""
    low, _ = lax.padtype_to_pads([taps], [taps], [1], "SAME")[0]
    padding = [(taps - 1 - low, holes - 1 + low)] * 2
    return cases.layer(
        (n, size, size, channels),
        (taps, taps, channels, features),
        padding,
        lhs_dilation=(holes, holes),
    )


def with_cotangent(conv: Any, x: jax.Array, w: jax.Array) -> list[jax.Array]:
    shape = jax.eval_shape(conv, x, w).shape
    return [x, w, cases.normal(np.random.default_rng(1), shape)]


@cases.drawn(4)
@given(cases.convolutions(sides=(3, 3), holes=(2, 3), apart=(1, 1), strides=(1, 1), sizes=(5, 6)))
def test_a_layer_and_its_gradients_are_as_accurate_as_they_were(case: Any) -> None:
    conv, args = case
    with ANY_SIZE:
        cases.check_accuracy(cases.all_three(conv), args, SWAPPED, PHASED)


@cases.drawn(4)
@given(cases.convolutions(sides=(3, 3)))
def test_any_convolution_may_swap(case: Any) -> None:
    conv, args = case
    always = SWAPPED._replace(applies=lambda eqn: True)
    cases.check_accuracy(conv, args[:2], always)


@cases.drawn(4)
@given(cases.convolutions(sides=(3, 3), holes=(2, 3), apart=(1, 1), strides=(1, 1), sizes=(5, 6)))
def test_any_with_holes_may_take_phases(case: Any) -> None:
    conv, args = case
    always = PHASED._replace(applies=lambda eqn: True)
    cases.check_accuracy(conv, args[:2], always)


def test_places_that_see_no_tap_are_zero() -> None:
    conv, x, w = layer(2, 4, 3, 1, 5, holes=3)
    with ANY_SIZE:
        got = jax.jit(optimize(conv))(x * jnp.nan, w)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(jax.jit(conv)(x * jnp.nan, w)))
    np.testing.assert_array_equal(got[:, 1::3, 1::3], 0)


def test_the_size_decides() -> None:
    def taken(*sizes: int) -> list[tuple[bool, bool]]:
        """By swapping or phases: the layer, and the gradients of its weights and of its input."""
        conv, x, w = layer(*sizes)
        args = with_cotangent(conv, x, w)
        fn = cases.all_three(conv)
        return list(
            zip(cases.takes(SWAPPED, fn, *args), cases.takes(PHASED, fn, *args), strict=True)
        )

    left = False, False
    assert taken(8, 8, 16, 4, 32) == [(False, True), (True, False), left]
    assert taken(64, 4, 16, 5, 16)[0] == (False, True)  # a kernel larger than its image
    assert taken(8, 4, 8, 3, 8) == [(False, True), (True, False), left]
    assert taken(64, 32, 128, 4, 1) == [left, (True, False), left]
    assert taken(64, 14, 128, 2, 128)[0] == left  # a tap for each phase


def test_only_auto_takes_them() -> None:
    conv, x, w = layer(2, 4, 3, 3, 5)
    fn, args = cases.all_three(conv), with_cotangent(conv, x, w)
    holes = [
        sum(eqn.params.get("lhs_dilation", (1,))[0] > 1 for eqn, *_ in walk_equations(jaxpr))
        for jaxpr in (jax.make_jaxpr(optimize(fn, mode))(*args) for mode in ("auto", "exact"))
    ]
    assert holes == [1, 2]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_scan_of_steps_does_not_depend_on_its_length(dtype: Any) -> None:
    conv, x, w = layer(2, 4, 3, 4, 3)
    with ANY_SIZE:
        cases.check_chunks(conv, x.astype(dtype), w.astype(dtype))
