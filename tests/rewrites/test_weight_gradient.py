"""Gradients of the weights of ordinary convolutions: matrix products of patches."""

import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from functrain.rewrites import optimize
from functrain.rewrites.weight_gradient import weight_gradient

from . import cases

MODULE = importlib.import_module("functrain.rewrites.weight_gradient")
# Images all at once, or few; a product for all taps, or one for each row of them.
HOW = {
    "all images, all taps": {"CACHE_BYTES": 2**30, "MIN_ROW_WIDTH": 2**30},
    "all images, row by row": {"CACHE_BYTES": 2**30, "MIN_ROW_WIDTH": 1},
    "some images, all taps": {"CACHE_BYTES": 2**15, "MIN_ROW_WIDTH": 2**30},
    "some images, row by row": {"CACHE_BYTES": 2**15, "MIN_ROW_WIDTH": 1},
}


def how(name: str) -> Any:
    return mock.patch.multiple(MODULE, MIN_FEATURES=0, MIN_PRODUCTS=0, **HOW[name])


@pytest.mark.parametrize("name", HOW)
@cases.drawn(2)
@given(
    case=cases.convolutions(
        sides=(5, 9), ranks=(2,), holes=(1, 1), sizes=(10, 11), windows=(2, 3), pads=(0, 2)
    )
)
def test_it_is_as_accurate_as_it_was(name: str, case: Any) -> None:
    conv, args = case
    with how(name), mock.patch.object(MODULE, "is_weight_gradient", return_value=True):
        cases.check_accuracy(cases.all_three(conv), args, weight_gradient)


def layer(name: str) -> Any:
    features = 3 if "row" in name else 40  # which of the two is last in a product
    return cases.layer((6, 12, 12, 5), (3, 3, 5, features))


@pytest.mark.parametrize("name", HOW)
def test_the_gradient_is_products_and_the_rest_as_it_was(name: str) -> None:
    conv, x, w = layer(name)
    fn, g = cases.all_three(conv), conv(x, w)
    with how(name):
        after = cases.rewritten(fn, (x, w, g), weight_gradient)
        assert cases.takes(weight_gradient, fn, x, w, g) == [False, True, False]
    assert cases.kinds(after).count("conv_general_dilated") == 2
    assert ("scan" in cases.kinds(after)) == ("some" in name)


@pytest.mark.parametrize("name", HOW)
def test_a_scan_of_steps_does_not_depend_on_its_length(name: str) -> None:
    with how(name):
        cases.check_chunks(*layer(name))


@pytest.mark.parametrize("name", HOW)
def test_nan_and_inf_pass_through_alike(name: str) -> None:
    conv, x, w = layer(name)
    fn, g = cases.all_three(conv), conv(x, w)
    x = x.at[0, 3, 3, 1].set(jnp.nan).at[1, 0, 0, 2].set(jnp.inf)
    with how(name):
        got = jax.jit(optimize(fn))(x, w, g)[2]
    want = jax.jit(fn)(x, w, g)[2]
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_array_equal(np.asarray(got)[~finite], np.asarray(want)[~finite])


@pytest.mark.parametrize("name", HOW)
def test_it_goes_on_inside_shard_map(name: str) -> None:
    conv, x, w = layer(name)
    mesh, spec = jax.sharding.Mesh(jax.devices()[:1], ("data",)), jax.sharding.PartitionSpec

    def gradient(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda w: conv(x, w), w)(g)[0][None]

    data = spec("data")
    fn = jax.shard_map(gradient, mesh=mesh, in_specs=(data, data), out_specs=data)
    with how(name):
        got = jax.jit(optimize(fn))(x, conv(x, w))  # a warning would be an error
    np.testing.assert_allclose(got, jax.jit(fn)(x, conv(x, w)), rtol=1e-4, atol=1e-3)


def test_the_sizes_decide() -> None:
    def taken(n: int, size: int, channels: int, taps: int, features: int, **options: Any) -> bool:
        shapes = (n, size, size, channels), (taps, taps, channels, features)
        conv, x, w = cases.layer(*shapes, **options)
        fn = cases.all_three(conv)
        return cases.takes(weight_gradient, fn, x, w, conv(x, w)) == [False, True, False]

    assert taken(8, 13, 32, 3, 64)
    assert not taken(4, 13, 32, 3, 64)  # few products
    assert taken(32, 28, 16, 3, 32, window_strides=(2, 2))
    assert taken(8, 28, 1, 3, 32)
    assert not taken(8, 28, 1, 3, 16)  # few channels and few features
    assert taken(8, 28, 3, 3, 32)
    assert not taken(8, 28, 3, 5, 32)  # few channels and many taps
    assert taken(8, 20, 48, 5, 192)
    assert not taken(8, 20, 48, 5, 256)  # many taps, and features in blocks of 128
    assert taken(32, 20, 48, 5, 256)  # but many places
    assert taken(4, 8, 128, 3, 64)
    assert not taken(8, 8, 128, 3, 64)  # many channels and many places
    assert not taken(1, 112, 32, 3, 64)  # patches larger than the cache
    assert not taken(8, 13, 32, 1, 64)
    assert not taken(64, 13, 32, 9, 4)
    assert not taken(64, 16, 16, 3, 16, padding=[(1, 1), (1, 1)], lhs_dilation=(2, 2))


def test_over_the_edges_it_takes_no_strides_and_few_images_only() -> None:
    def taken(n: int, features: int, **options: Any) -> bool:
        conv, x, w = cases.layer((n, 4, 4, 8), (5, 5, 8, features), **options)
        return cases.takes(weight_gradient, conv, x, w) == [True]

    assert taken(64, 256)
    assert not taken(64, 256, window_strides=(2, 2))
    assert not taken(512, 256)
