"""Convolutions computed in another way: other sums, as accurate as those they replace."""

import contextlib
import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from functrain.rewrites import optimize
from functrain.rewrites._equations import walk_equations
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites.depthwise_conv import MAX_CHANNELS, MAX_TAPS, depthwise_conv
from functrain.rewrites.dot_conv import dot_conv
from functrain.rewrites.grouped_conv import grouped_conv
from functrain.rewrites.patch_conv import patch_conv
from functrain.rewrites.swapped_conv import swapped_conv
from functrain.rewrites.volume_conv import volume_conv

from . import cases
from .cases import all_three, kinds, takes

PATCHES = patch_conv._replace(applies=lambda eqn: True)
SWAPPED = swapped_conv._replace(applies=lambda eqn: True)


@contextlib.contextmanager
def any_size() -> Any:
    """Context manager: small convolutions are rewritten as well."""
    dot, volume = (
        importlib.import_module(f"functrain.rewrites.{name}")
        for name in ("dot_conv", "volume_conv")
    )
    with mock.patch.object(dot, "NARROW", 0), mock.patch.object(volume, "MIN_PRODUCTS", 0):
        yield


DRAWN: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "depthwise": ({"sides": (-1, 3), "groups": (2, 4)}, [depthwise_conv]),
    "grouped": ({"sides": (3, 3), "groups": (2, 4)}, [depthwise_conv, grouped_conv]),
    "one tap": ({"sides": (4, 4), "windows": (1, 1), "holes": (1, 1)}, [dot_conv]),
    "large kernel": (
        {"sides": (4, 4), "holes": (1, 1), "sizes": (1, 2), "pads": (1, 2)},
        [dot_conv, PATCHES],
    ),
    "patches": ({"sides": (4, 4)}, [PATCHES]),
    "transposed": (
        {"sides": (3, 3), "holes": (2, 3), "apart": (1, 1), "strides": (1, 1), "sizes": (5, 6)},
        [swapped_conv],
    ),
    "swapped": ({"sides": (3, 3)}, [SWAPPED]),
    "volume": ({"sides": (3, 3), "ranks": (3,)}, [volume_conv]),
}


@pytest.mark.parametrize("kind", DRAWN)
@cases.drawn(4)
@given(st.data())
def test_a_layer_and_its_gradients_are_as_accurate_as_they_were(
    kind: str, data: st.DataObject
) -> None:
    options, rules = DRAWN[kind]
    conv, args = data.draw(cases.convolutions(**options))
    with any_size():
        # Rules that would take any convolution are for layers alone.
        if PATCHES in rules or SWAPPED in rules:
            cases.check_accuracy(conv, args[:2], *rules)
        else:
            cases.check_accuracy(all_three(conv), args, *rules)


def transposed(n: int, size: int, channels: int, taps: int, features: int) -> Any:
    """A layer as Keras's Conv2DTranspose has it, with strides 2 and padding "same"."""
    low, _ = lax.padtype_to_pads([taps], [taps], [1], "SAME")[0]
    kernel, padding = (taps, taps, channels, features), [(taps - 1 - low, 1 + low)] * 2
    return cases.layer((n, size, size, channels), kernel, padding, lhs_dilation=(2, 2))


def grouped(groups: int, channels: int, features: int, taps: int = 3) -> Any:
    kernel = (taps, taps, channels // groups, features)
    return cases.layer((4, 8, 8, channels), kernel, feature_group_count=groups)


LAYERS = {
    "depthwise": grouped(6, 6, 6),
    "two features a channel": grouped(6, 6, 12),
    "grouped": grouped(3, 12, 6),
    "1 x 1": cases.layer((2, 4, 4, 3), (1, 1, 3, 5)),
    "1 x 1 image": cases.layer((2, 1, 1, 3), (3, 3, 3, 5)),
    "2 x 2 image": cases.layer((2, 2, 2, 3), (3, 3, 3, 5)),
    "1-D": cases.layer((2, 2, 3), (5, 3, 5)),
    "transposed": transposed(2, 4, 3, 4, 3),
    "volume": cases.layer((2, 4, 5, 6, 2), (3, 2, 3, 2, 4)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, jnp.float32) for name in LAYERS), ("transposed", jnp.bfloat16)],
)
def test_a_scan_of_steps_does_not_depend_on_its_length(name: str, dtype: Any) -> None:
    conv, x, w = LAYERS[name]
    with any_size():
        cases.check_chunks(conv, x.astype(dtype), w.astype(dtype))


@pytest.mark.parametrize("name", LAYERS)
def test_nan_and_inf_in_an_image_pass_through_alike(name: str) -> None:
    conv, x, w = LAYERS[name]
    x = x.at[(0,) * x.ndim].set(jnp.nan).at[(1, *[0] * (x.ndim - 1))].set(jnp.inf)
    with any_size():
        got, want = jax.jit(optimize(conv))(x, w), jax.jit(conv)(x, w)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_array_equal(np.asarray(got)[~finite], np.asarray(want)[~finite])


@pytest.mark.parametrize("name", LAYERS)
def test_only_auto_reorders_sums(name: str) -> None:
    conv, x, w = LAYERS[name]
    fn, g = all_three(conv), jnp.ones(jax.eval_shape(conv, x, w).shape)
    with any_size():
        auto, exact = (str(jax.make_jaxpr(optimize(fn, mode))(x, w, g)) for mode in MODES)
    assert auto != exact
    assert exact.count("conv_general_dilated[") == 3


MODES: Any = ("auto", "exact")


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


def test_the_groups_decide() -> None:
    def became(groups: int, channels: int, features: int, taps: int = 3) -> str:
        conv, x, w = grouped(groups, channels, features, taps)
        new = kinds(cases.rewritten(conv, (x, w), depthwise_conv, grouped_conv))
        return "loop" if "scan" in new else "as it was" if len(new) == 1 else "shifts"

    assert became(4, 4, 4) == "shifts"
    assert became(4, 4, 4 * MAX_CHANNELS) == "shifts"
    assert became(4, 8, 8) == "loop"
    assert became(4, 4, 4 * (MAX_CHANNELS + 1)) == "as it was"
    assert became(4, 4, 4, taps=int(MAX_TAPS**0.5) + 1) == "as it was"


def test_what_is_no_float_or_empty_is_left_alone() -> None:
    conv, x, w = grouped(4, 4, 4)
    for lhs, rhs in ((x.astype(int), w.astype(int)), (x + 1j, w + 1j), (x[:0], w)):
        closed = jax.make_jaxpr(conv)(lhs, rhs)
        assert rewrite_jaxpr(closed, [depthwise_conv, grouped_conv]) is closed
    conv, x, w = cases.layer((2, 2, 2, 3), (3, 3, 3, 4), "VALID")
    assert not any(takes(rule, conv, x, w)[0] for rule in (patch_conv, dot_conv))
    assert jax.jit(optimize(conv))(x, w).shape == (2, 0, 0, 4)


def test_doubles_that_cannot_be_made_here_are_left_alone() -> None:
    image, kernel, groups = (2, 8, 8, 4), (5, 5, 1, 4), {"feature_group_count": 4}
    conv, x, w = cases.layer(image, kernel, **groups)
    wider, *_ = cases.layer(image, kernel, **groups, preferred_element_type=jnp.float64)

    def inside(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            return conv(x.astype(jnp.float64), w.astype(jnp.float64))

    assert takes(depthwise_conv, conv, x, w) == [True]
    assert takes(depthwise_conv, inside, x, w) == [False]
    got, want = jax.jit(optimize(inside))(x, w), jax.jit(inside)(x, w)
    assert got.dtype == jnp.float64
    np.testing.assert_array_equal(got, want)
    with jax.enable_x64(True):
        assert takes(depthwise_conv, conv, x.astype(float), w.astype(float)) == [True]
        assert takes(depthwise_conv, wider, x, w) == [False]


@pytest.mark.parametrize("groups", [6, 3])
def test_without_spatial_axes_there_is_nothing_to_shift(groups: int) -> None:
    conv, x, w = cases.layer((4, 6), (6 // groups, 6), (), feature_group_count=groups)
    got = jax.jit(optimize(conv))(x, w)  # a warning would be an error
    np.testing.assert_allclose(got, jax.jit(conv)(x, w), rtol=1e-5, atol=1e-6)


def taken(rule: Any, conv: Any, x: Any, w: Any) -> list[bool]:
    """Whether a rule takes a layer, and the gradients of its weights and of its input."""
    return takes(rule, all_three(conv), x, w, jnp.ones(jax.eval_shape(conv, x, w).shape))


def test_patches_are_for_kernels_larger_than_the_image() -> None:
    def patched(image: int, taps: int, padding: str = "SAME", batch: int = 16) -> list[bool]:
        sizes = (batch, image, image, 32), (taps, taps, 32, 32)
        return taken(patch_conv, *cases.layer(*sizes, padding))

    # Gradients of weights take no patches of all images.
    assert patched(2, 3) == [True, False, True]
    assert patched(4, 5) == [True, False, True]
    assert patched(3, 3) == [False, False, False]
    # The result is smaller than the kernel, and it is the image in the gradient of the input.
    assert patched(4, 3, "VALID") == [True, False, True]
    # Few pixels: the kernel would be transposed for the gradient of the input.
    assert patched(4, 3, batch=2) == [False, False, True]
    assert patched(4, 1, batch=2) == [False, False, False]


def test_images_with_holes_take_no_patches() -> None:
    """With its holes such an image is wider than the kernel, and patches would copy them."""
    same = [(2, 3), (2, 3)]
    layer = cases.layer((64, 4, 4, 256), (5, 5, 256, 128), same, lhs_dilation=(2, 2))
    assert takes(patch_conv, *layer) == [False]
    layer = cases.layer((128, 8, 8, 64), (5, 5, 64, 64), window_strides=(2, 2))
    assert taken(patch_conv, *layer) == [False, False, False]


def test_patches_of_many_images_are_made_of_some_at_a_time() -> None:
    conv, x, w = cases.layer((2000, 2, 2, 128), (3, 3, 128, 128))
    module = importlib.import_module("functrain.rewrites.patch_conv")
    with mock.patch.object(module, "MAX_BYTES", 2**20):
        program = jax.jit(optimize(conv)).lower(x, w).compile()
        cases.check_accuracy(conv, (x[:70], w), PATCHES)
    of_all = 2000 * 2 * 2 * 9 * 128 * 4
    assert program.memory_analysis().temp_size_in_bytes < of_all / 2


def test_a_program_does_not_grow_with_the_image() -> None:
    """In the gradient of the weights each of the 676 pixels is a tap."""
    conv, x, w = cases.layer((32, 26, 26, 1), (3, 3, 1, 8))
    fn, g = all_three(conv), jnp.ones((32, 26, 26, 8))
    assert len(jax.make_jaxpr(optimize(fn))(x, w, g).eqns) < 100


def test_one_tap_with_a_stride_stays() -> None:
    layer = cases.layer((2, 8, 8, 16), (1, 1, 16, 16), window_strides=(2, 2))
    assert taken(dot_conv, *layer) == [False, True, True]
    assert taken(dot_conv, *cases.layer((2, 8, 8, 16), (1, 1, 16, 16))) == [True, True, True]


def test_gradients_of_the_weights_of_transposed_layers_are_swapped() -> None:
    for sizes in ((8, 8, 16, 4, 32), (64, 32, 128, 4, 1)):
        assert taken(swapped_conv, *transposed(*sizes)) == [False, True, False]


def test_no_3d_convolution_is_left_in_a_layer_and_its_gradients() -> None:
    conv, x, w = LAYERS["volume"]
    fn, g = all_three(conv), jnp.ones(jax.eval_shape(conv, x, w).shape)
    with any_size():
        after = jax.make_jaxpr(optimize(fn))(x, w, g)
    assert max(len(e.params.get("window_strides", ())) for e, *_ in walk_equations(after)) == 2
    assert takes(volume_conv, *cases.layer((8, 16, 16, 16, 8), (3, 3, 3, 8, 16))) == [True]
    assert takes(volume_conv, *cases.layer((1, 4, 4, 4, 2), (3, 3, 3, 2, 2))) == [False]
    assert takes(volume_conv, *cases.layer((8, 16, 16, 8), (3, 3, 8, 16))) == [False]
