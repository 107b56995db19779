"""Convolutions that are matrix products: one tap, one place, few small images."""

import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from functrain.rewrites import optimize
from functrain.rewrites.dot_conv import dot_conv
from functrain.rewrites.patch_conv import patch_conv

from . import cases

module = importlib.import_module("functrain.rewrites.patch_conv")
ANY_SIZE = mock.patch.object(importlib.import_module("functrain.rewrites.dot_conv"), "NARROW", 0)
ALWAYS = patch_conv._replace(applies=lambda eqn: True)


@cases.drawn(4)
@given(cases.convolutions(sides=(4, 4), windows=(1, 1), strides=(1, 1), holes=(1, 1)))
def test_one_tap_is_a_product(case: Any) -> None:
    conv, args = case
    with ANY_SIZE:
        after = cases.rewritten(cases.all_three(conv), args, dot_conv)
    assert cases.kinds(after).count("conv_general_dilated") < 2


@cases.drawn(4)
@given(cases.convolutions(sides=(4, 4), windows=(1, 1), holes=(1, 1)))
def test_one_tap_is_as_accurate_as_it_was(case: Any) -> None:
    conv, args = case
    with ANY_SIZE:
        cases.check_accuracy(cases.all_three(conv), args, dot_conv)


@cases.drawn(3)
@given(cases.convolutions(sides=(4, 4), windows=(1, 1), strides=(2, 2)))
def test_one_tap_with_a_stride_stays(case: Any) -> None:
    conv, args = case
    forward = cases.rewritten(conv, args[:2], dot_conv)
    assert cases.kinds(forward).count("conv_general_dilated") == 1


@cases.drawn(4)
@given(cases.convolutions(sides=(4, 4), holes=(1, 1), apart=(1, 2), sizes=(1, 2), pads=(1, 2)))
def test_a_kernel_larger_than_the_image_is_as_accurate_as_it_was(case: Any) -> None:
    conv, args = case
    cases.check_accuracy(cases.all_three(conv), args, dot_conv, ALWAYS)


@cases.drawn(4)
@given(cases.convolutions(sides=(4, 4)))
def test_any_convolution_may_take_patches(case: Any) -> None:
    conv, args = case
    cases.check_accuracy(cases.all_three(conv), args, ALWAYS)


LAYERS = {
    "1 x 1": ((2, 4, 4, 3), (1, 1, 3, 5)),
    "1 x 1 image": ((2, 1, 1, 3), (3, 3, 3, 5)),
    "2 x 2 image": ((2, 2, 2, 3), (3, 3, 3, 5)),
    "1-D": ((2, 2, 3), (5, 3, 5)),
}


def layer(name: str) -> Any:
    return cases.layer(*LAYERS[name])


@pytest.mark.parametrize("name", LAYERS)
def test_no_convolution_is_left(name: str) -> None:
    conv, x, w = layer(name)

    def fn(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda x: conv(x, w), x)
        return out, *pull(g)

    args = x, w, jnp.ones(jax.eval_shape(conv, x, w).shape)
    with ANY_SIZE:
        assert "conv_general_dilated" not in cases.kinds(jax.make_jaxpr(optimize(fn))(*args))
    assert "dot_general" not in cases.kinds(jax.make_jaxpr(optimize(fn, "exact"))(*args))


def test_gradients_of_weights_take_no_patches_of_all_images() -> None:
    conv, x, w = cases.layer((64, 2, 2, 4), (3, 3, 4, 4))
    fn, g = cases.all_three(conv), conv(x, w)
    assert cases.takes(patch_conv, fn, x, w, g) == [True, False, True]


@pytest.mark.parametrize("name", LAYERS)
def test_a_scan_of_steps_does_not_depend_on_its_length(name: str) -> None:
    conv, x, w = layer(name)
    with ANY_SIZE:
        cases.check_chunks(conv, x, w)


@pytest.mark.parametrize("name", LAYERS)
def test_nan_and_inf_in_an_image_pass_through_alike(name: str) -> None:
    conv, x, w = layer(name)
    x = x.at[(0,) * x.ndim].set(jnp.nan).at[(1,) + (0,) * (x.ndim - 1)].set(jnp.inf)
    with ANY_SIZE:
        got, want = jax.jit(optimize(conv))(x, w), jax.jit(conv)(x, w)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_array_equal(np.asarray(got)[~finite], np.asarray(want)[~finite])


def test_patches_are_for_kernels_larger_than_the_image() -> None:
    def taken(image: int, taps: int, padding: str = "SAME", batch: int = 16) -> list[bool]:
        conv, x, w = cases.layer((batch, image, image, 32), (taps, taps, 32, 32), padding)
        fn, g = cases.all_three(conv), jnp.ones(jax.eval_shape(conv, x, w).shape)
        return cases.takes(patch_conv, fn, x, w, g)

    assert taken(2, 3) == [True, False, True]
    assert taken(4, 5) == [True, False, True]
    assert taken(3, 3) == [False, False, False]
    # The result is smaller than the kernel, and it is the image in the gradient of the input.
    assert taken(4, 3, "VALID") == [True, False, True]
    # Few pixels: the kernel would be transposed for the gradient of the input.
    assert taken(4, 3, batch=2) == [False, False, True]
    assert taken(4, 1, batch=2) == [False, False, False]


def test_images_with_holes_take_no_patches() -> None:
    """With its holes such an image is wider than the kernel, and patches would copy them."""
    image, kernel, same = (64, 4, 4, 256), (5, 5, 256, 128), [(2, 3), (2, 3)]
    transposed, x, w = cases.layer(image, kernel, same, lhs_dilation=(2, 2))
    assert cases.takes(patch_conv, transposed, x, w) == [False]
    strided, x, w = cases.layer((128, 8, 8, 64), (5, 5, 64, 64), window_strides=(2, 2))
    fn, g = cases.all_three(strided), jnp.ones(jax.eval_shape(strided, x, w).shape)
    assert cases.takes(patch_conv, fn, x, w, g) == [False, False, False]


def test_patches_of_many_images_are_made_of_some_at_a_time() -> None:
    conv, x, w = cases.layer((2000, 2, 2, 128), (3, 3, 128, 128))
    with mock.patch.object(module, "MAX_BYTES", 2**20):
        program = jax.jit(optimize(conv)).lower(x, w).compile()
        cases.check_accuracy(conv, (x[:70], w), ALWAYS)
    of_all = 2000 * 2 * 2 * 9 * 128 * 4
    assert program.memory_analysis().temp_size_in_bytes < of_all / 2


def test_a_program_does_not_grow_with_the_image() -> None:
    """In the gradient of the weights each of the 676 pixels is a tap."""
    conv, x, w = cases.layer((32, 26, 26, 1), (3, 3, 1, 8))
    fn, g = cases.all_three(conv), jnp.ones((32, 26, 26, 8))
    assert len(jax.make_jaxpr(optimize(fn))(x, w, g).eqns) < 100


def test_an_empty_result_is_left_alone() -> None:
    conv, x, w = cases.layer((2, 2, 2, 3), (3, 3, 3, 4), "VALID")
    assert not any(cases.takes(rule, conv, x, w)[0] for rule in (patch_conv, dot_conv))
    assert jax.jit(optimize(conv))(x, w).shape == (2, 0, 0, 4)
