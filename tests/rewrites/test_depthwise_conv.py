"""Depthwise and grouped convolutions: other sums, as accurate as those they replace."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

from functrain.rewrites import optimize
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites.depthwise_conv import MAX_CHANNELS, MAX_TAPS, depthwise_conv
from functrain.rewrites.grouped_conv import grouped_conv

from . import cases
from .cases import all_three, kinds, normal


@cases.drawn(4)
@given(cases.convolutions(sides=(-1, 3), groups=(2, 4)))
def test_depthwise_is_as_accurate_as_it_was(case: Any) -> None:
    conv, args = case
    cases.check_accuracy(all_three(conv), args, depthwise_conv)


@pytest.mark.parametrize(
    ("window", "strides"), [((7, 7), (1, 1)), ((8, 5), (2, 1)), ((9, 9), (1, 2))]
)
def test_many_taps_are_taken_in_bands(window: tuple[int, ...], strides: tuple[int, ...]) -> None:
    conv, x, w = cases.layer(
        (2, 13, 12, 4), (*window, 1, 8), feature_group_count=4, window_strides=strides
    )
    args = x, w, conv(x, w)
    assert "scan" in kinds(cases.rewritten(conv, args[:2], depthwise_conv))
    cases.check_accuracy(all_three(conv), args, depthwise_conv)
    cases.check_chunks(conv, x, w)


@cases.drawn(4)
@given(cases.convolutions(sides=(3, 3), groups=(2, 4)))
def test_grouped_is_as_accurate_as_it_was(case: Any) -> None:
    conv, args = case
    cases.check_accuracy(all_three(conv), args, depthwise_conv, grouped_conv)


def layer(groups: int, channels: int, features: int, taps: int = 3) -> Any:
    image, kernel = (4, 8, 8, channels), (taps, taps, channels // groups, features)
    return cases.layer(image, kernel, feature_group_count=groups)


SHAPES = {"depthwise": (6, 6, 6), "two a channel": (6, 6, 12), "grouped": (3, 12, 6)}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_scan_of_steps_does_not_depend_on_its_length(shape: str) -> None:
    conv, x, w = layer(*SHAPES[shape])

    cases.check_chunks(conv, x, w)


@pytest.mark.parametrize("shape", SHAPES)
def test_nan_and_inf_pass_through_alike(shape: str) -> None:
    conv, x, w = layer(*SHAPES[shape])
    x = x.at[0, -1, 1, 1].set(jnp.nan).at[1, 1, 2, 4].set(jnp.inf).at[2, 0, 0, 0].set(-jnp.inf)
    fn, g = all_three(conv), jnp.ones(jax.eval_shape(conv, x, w).shape)
    for got, want in zip(jax.jit(optimize(fn))(x, w, g), jax.jit(fn)(x, w, g), strict=True):
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        np.testing.assert_array_equal(np.asarray(got)[~finite], np.asarray(want)[~finite])


@pytest.mark.parametrize("shape", SHAPES)
def test_only_auto_reorders_sums(shape: str) -> None:
    conv, x, w = layer(*SHAPES[shape])
    assert "conv_general_dilated" not in kinds(jax.make_jaxpr(optimize(conv))(x, w))
    assert kinds(jax.make_jaxpr(optimize(conv, "exact"))(x, w)) == ["conv_general_dilated"]


def test_the_shape_decides() -> None:
    def became(groups: int, channels: int, features: int, taps: int = 3) -> str:
        conv, x, w = layer(groups, channels, features, taps)
        new = kinds(rewrite_jaxpr(jax.make_jaxpr(conv)(x, w), [depthwise_conv, grouped_conv]))
        return "loop" if "scan" in new else "as it was" if len(new) == 1 else "shifts"

    assert became(4, 4, 4) == "shifts"
    assert became(4, 4, 4 * MAX_CHANNELS) == "shifts"
    assert became(4, 8, 8) == "loop"
    assert became(4, 4, 4 * (MAX_CHANNELS + 1)) == "as it was"
    assert became(4, 4, 4, taps=int(MAX_TAPS**0.5) + 1) == "as it was"


def test_what_is_no_float_or_empty_is_left_alone() -> None:
    conv, x, w = layer(4, 4, 4)
    for lhs, rhs in ((x.astype(int), w.astype(int)), (x + 1j, w + 1j), (x[:0], w)):
        closed = jax.make_jaxpr(conv)(lhs, rhs)
        assert rewrite_jaxpr(closed, [depthwise_conv, grouped_conv]) is closed


def test_doubles_that_cannot_be_made_here_are_left_alone() -> None:
    rule = depthwise_conv
    conv, x, w = cases.layer((2, 8, 8, 4), (5, 5, 1, 4), feature_group_count=4)
    wider, x_, w_ = cases.layer(
        (2, 8, 8, 4),
        (5, 5, 1, 4),
        feature_group_count=4,
        preferred_element_type=jnp.float64,
    )

    def inside(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            return conv(x.astype(jnp.float64), w.astype(jnp.float64))

    assert cases.takes(rule, conv, x, w) == [True]
    assert cases.takes(rule, inside, x, w) == [False]
    got, want = jax.jit(optimize(inside))(x, w), jax.jit(inside)(x, w)
    assert got.dtype == jnp.float64
    np.testing.assert_array_equal(got, want)
    with jax.enable_x64(True):
        assert cases.takes(rule, conv, x.astype(float), w.astype(float)) == [True]
        assert cases.takes(rule, wider, x_, w_) == [False]


@pytest.mark.parametrize("shape", SHAPES)
def test_without_spatial_axes_there_is_nothing_to_shift(shape: str) -> None:
    groups, channels, features = SHAPES[shape]
    conv, x, w = cases.layer(
        (4, channels), (channels // groups, features), (), feature_group_count=groups
    )
    got = jax.jit(optimize(conv))(x, w)  # a warning would be an error
    np.testing.assert_allclose(got, jax.jit(conv)(x, w), rtol=1e-5, atol=1e-6)


def test_the_result_type_is_kept() -> None:
    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", feature_group_count=4, preferred_element_type=jnp.float32
        )

    rng = np.random.default_rng(0)
    x, w = (normal(rng, shape, jnp.bfloat16) for shape in ((2, 4, 6, 6), (4, 1, 3, 3)))
    got = jax.jit(optimize(conv))(x, w)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, jax.jit(conv)(x, w), rtol=1e-5, atol=1e-5)
