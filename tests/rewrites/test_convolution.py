"""Convolutions by each method of functrain.rewrites.convolution, and the choice among them."""

import contextlib
import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from functrain.inspect import explain_rewrites
from functrain.rewrites import optimize
from functrain.rewrites._equations import walk_equations
from functrain.rewrites.convolution import _plan, convolution, patches, swapped_conv
from functrain.rewrites.convolution._description import Convolution, describe

from . import cases

METHODS = {method.name: method for method in _plan.METHODS}


@contextlib.contextmanager
def prefer(name: str) -> Iterator[None]:
    """Plans use this method wherever it applies, and otherwise XLA's own kernel."""

    def estimate(method: Any, conv: Convolution, parts: float = 0.0) -> float:
        return {name: 0.0, "xla": 1.0}.get(method.name, 2.0)

    with mock.patch.object(_plan, "estimate", estimate):
        _plan.all_plans.cache_clear()
        yield
    _plan.all_plans.cache_clear()


def plans(fn: Any, *args: jax.Array) -> list[str]:
    """The plan of each convolution of a function."""
    names = []
    for eqn, *_ in walk_equations(jax.make_jaxpr(fn)(*args)):
        if eqn.primitive.name == "conv_general_dilated":
            plan = _plan.best_plan(describe(*(var.aval for var in eqn.invars), eqn.params))
            names.append(plan.name if plan else "")
    return names


def gradients(conv: Any, x: jax.Array, w: jax.Array) -> tuple[Any, list[jax.Array]]:
    """A layer with both gradients, and arguments for it."""
    shape = jax.eval_shape(conv, x, w).shape
    g = cases.normal(np.random.default_rng(1), shape, x.dtype)
    return cases.all_three(conv), [x, w, g]


# The convolutions to draw for each method.
DRAWN: dict[str, dict[str, Any]] = {
    "product": {"sides": (4, 4), "windows": (1, 1), "pads": (0, 0)},
    "patches": {"sides": (4, 4)},
    "blocked_patches": {"sides": (3, 3), "holes": (1, 1)},
    "shifts": {"sides": (4, 4), "windows": (2, 3)},
    "depthwise": {"sides": (-1, 3), "groups": (2, 4)},
    "depthwise_gradient": {"sides": (-1, 3), "groups": (2, 4)},
    "trimmed": {"sides": (2, 2), "sizes": (1, 2), "windows": (3, 5), "pads": (2, 3)},
    "swapped": {"sides": (3, 3), "holes": (2, 3), "apart": (1, 1), "sizes": (5, 6)},
    "phases": {
        "sides": (3, 3), "holes": (2, 3), "apart": (1, 1), "strides": (1, 1), "sizes": (5, 6)
    },
    "planes": {"sides": (3, 3), "ranks": (3,)},
    "groups": {"sides": (3, 3), "groups": (2, 4)},
}  # fmt: skip


def test_each_method_is_tested() -> None:
    assert {*DRAWN, "xla"} == set(METHODS)


@pytest.mark.parametrize("name", DRAWN)
@cases.drawn(4)
@given(data=st.data())
def test_a_method_is_as_accurate_as_xla(name: str, data: Any) -> None:
    conv, args = data.draw(cases.convolutions(**DRAWN[name]))
    # Blocks even for small arrays.
    with prefer(name), mock.patch.object(patches, "CACHE_BYTES", 2**10):
        fn = cases.all_three(conv)
        if any(name in plan for plan in plans(fn, *args)):
            cases.check_accuracy(fn, args, convolution)


# A layer for each method, and which of its three convolutions takes it: the layer, the gradient
# of its weights, that of its input.
LAYERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "product": ((4, 6, 6, 3), (1, 1, 3, 5), {}),
    "patches": ((2, 6, 6, 3), (3, 3, 3, 5), {}),
    "blocked_patches": ((32, 4, 4, 4), (3, 3, 4, 6), {}),
    "shifts": ((2, 6, 6, 3), (3, 3, 3, 5), {}),
    "depthwise": ((4, 8, 8, 6), (3, 3, 1, 12), {"feature_group_count": 6}),
    "depthwise_gradient": ((4, 8, 8, 6), (3, 3, 1, 12), {"feature_group_count": 6}),
    "trimmed": ((4, 2, 3, 3), (5, 5, 3, 4), {}),
    "swapped": ((2, 5, 5, 3), (4, 4, 3, 4), {"padding": [(2, 2)] * 2, "lhs_dilation": (2, 2)}),
    "phases": ((4, 4, 4, 3), (4, 4, 3, 4), {"padding": [(2, 2)] * 2, "lhs_dilation": (2, 2)}),
    "planes": ((4, 4, 5, 6, 2), (3, 2, 3, 2, 4), {}),
    "groups": ((4, 8, 8, 12), (3, 3, 4, 6), {"feature_group_count": 3}),
}


@contextlib.contextmanager
def layer(name: str) -> Iterator[tuple[Any, jax.Array, jax.Array]]:
    """A layer of which at least one convolution takes the method."""
    image, kernel, options = LAYERS[name]
    conv, x, w = cases.layer(image, kernel, **options)
    with prefer(name), mock.patch.object(patches, "CACHE_BYTES", 2**12):
        fn, args = gradients(conv, x, w)
        assert any(name in plan for plan in plans(fn, *args))
        yield conv, x, w


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_a_scan_of_steps_does_not_depend_on_its_length(name: str, dtype: Any) -> None:
    with layer(name) as (conv, x, w):
        cases.check_chunks(conv, x.astype(dtype), w.astype(dtype))


@pytest.mark.parametrize("name", LAYERS)
def test_nan_and_inf_in_an_image_pass_through_alike(name: str) -> None:
    with layer(name) as (conv, x, w):
        x = x.at[(0,) * x.ndim].set(jnp.nan).at[(1,) + (0,) * (x.ndim - 1)].set(jnp.inf)
        got, want = jax.jit(optimize(conv))(x, w), jax.jit(conv)(x, w)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    np.testing.assert_array_equal(np.asarray(got)[~finite], np.asarray(want)[~finite])


@pytest.mark.parametrize("name", LAYERS)
def test_methods_work_inside_shard_map(name: str) -> None:
    with layer(name) as (conv, x, w):

        def fn(x: jax.Array) -> tuple[jax.Array, ...]:
            out, pull = jax.vjp(conv, x, w)
            dx, dw = pull(out)
            return out, dx, dw[None]

        cases.check_shard_map(fn, [x])


@pytest.mark.parametrize("name", LAYERS)
def test_only_auto_uses_methods(name: str) -> None:
    with layer(name) as (conv, x, w):
        fn, args = gradients(conv, x, w)
        rules = {row.rule for row in explain_rewrites(fn, *args).rows}
        exact = {row.rule for row in explain_rewrites(fn, *args, rewrites="exact").rows}
    assert "convolution" in rules
    assert "convolution" not in exact


@cases.drawn(4)
@given(cases.convolutions(sides=(3, 3), holes=(2, 3), apart=(1, 1), sizes=(5, 6)))
def test_the_swap_of_tpus_is_as_accurate_as_xla(case: Any) -> None:
    conv, args = case
    fn = cases.all_three(conv)
    if any(cases.takes(swapped_conv, fn, *args)):
        cases.check_accuracy(fn, args, swapped_conv)


def test_places_that_see_no_tap_are_zero() -> None:
    conv, x, w = cases.layer((2, 4, 4, 3), (1, 1, 3, 5), [(0, 2)] * 2, lhs_dilation=(3, 3))
    with prefer("phases"):
        got = jax.jit(optimize(conv))(x * jnp.nan, w)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(jax.jit(conv)(x * jnp.nan, w)))
    np.testing.assert_array_equal(got[:, 1::3, 1::3], 0)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_only_taps_that_see_something_are_left(groups: int) -> None:
    conv, x, w = cases.layer((2, 2, 3, 4), (5, 3, 4 // groups, 8), feature_group_count=groups)
    with prefer("xla"):
        after = cases.rewritten(conv, (x, w), convolution)
    kernels = [eqn.invars[1] for eqn, *_ in walk_equations(after) if "conv" in eqn.primitive.name]
    assert {kernel.aval.shape[:2] for kernel in kernels} == {(3, 3)}


def test_an_image_that_no_tap_sees_is_left_alone() -> None:
    conv, x, w = cases.layer((2, 2, 2, 3), (1, 1, 3, 4), [(5, -3), (5, -3)])
    np.testing.assert_array_equal(jax.jit(optimize(conv))(x, w), jax.jit(conv)(x, w))


def test_many_taps_are_summed_in_bands() -> None:
    conv, x, w = cases.layer((2, 13, 12, 4), (9, 9, 1, 8), feature_group_count=4)
    assert "scan" in cases.kinds(cases.rewritten(conv, (x, w), convolution))
    cases.check_accuracy(*gradients(conv, x, w), convolution)


def test_sums_over_thousands_of_images_keep_their_digits() -> None:
    conv, x, w = cases.layer((3000, 2, 2, 4), (3, 3, 1, 4), feature_group_count=4)
    x = jnp.abs(x)
    cases.check_accuracy(cases.all_three(conv), (x, w, jnp.abs(conv(x, w))), convolution)


def test_patches_in_blocks_need_no_memory_for_all() -> None:
    conv, x, w = cases.layer((512, 8, 8, 64), (3, 3, 64, 64))
    with prefer("blocked_patches"):
        program = jax.jit(optimize(conv)).lower(x, w).compile()
    of_all = 512 * 8 * 8 * 9 * 64 * 4
    assert program.memory_analysis().temp_size_in_bytes < of_all / 2


def test_a_program_does_not_grow_with_the_image() -> None:
    """In the gradient of the weights every place of the image is a tap."""
    conv, x, w = cases.layer((32, 26, 26, 1), (3, 3, 1, 8))
    fn, args = gradients(conv, x, w)
    assert len(jax.make_jaxpr(optimize(fn))(*args).eqns) < 60


def test_the_explanation_shows_the_plan_and_the_next_two() -> None:
    conv, x, w = cases.layer((16, 2, 2, 512), (3, 3, 512, 512))
    (row,) = explain_rewrites(conv, x, w).rows
    assert row.rule == "convolution"
    assert "estimated" in row.reason
    assert "next" in row.reason


def test_the_weights_say_where_they_were_measured() -> None:
    path = pathlib.Path(_plan.__file__).with_name("weights.json")
    weights = json.loads(path.read_text())
    assert set(weights) == {"machine", "date", "jax", "functrain", "weights"}
    assert all(value >= 0 for each in weights["weights"].values() for value in each.values())


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_method_has_weights_for_every_kind_of_convolution(rank: int, dtype: Any) -> None:
    for holes, window, groups, by_channel in itertools.product((1, 2), (3, 5), (1, 4), (0, 1)):
        ones = (1,) * rank
        conv = Convolution(
            *(2, (7,) * rank, 4, (window,) * rank, 8, ((-3, 0),) * rank),
            *(ones, (holes,) * rank, ones),
            groups=groups,
            dtype=jnp.dtype(dtype),
            is_batch_last=bool(by_channel),
        )
        for method in _plan.METHODS:
            if method.name != "trimmed":
                weights = _plan._find_weights(_plan.weights_key(method.name, conv))
                assert set(weights) == {*method.features(conv), "parts"}


@pytest.mark.parametrize(
    ("conv", "plan"),
    [
        (cases.layer((16, 32, 32, 32), (3, 3, 1, 32), feature_group_count=32), "depthwise"),
        (cases.layer((8, 28, 28, 64), (3, 3, 2, 64), feature_group_count=32), "groups(xla)"),
        (cases.layer((16, 1, 1, 512), (3, 3, 512, 512)), "trimmed(patches)"),
        (cases.layer((64, 28, 28, 64), (3, 3, 64, 64)), "xla"),
        (cases.layer((8, 16, 16, 16, 8), (3, 3, 3, 8, 16)), "planes(xla)"),
    ],
)
def test_the_plans_of_known_layers(conv: Any, plan: str) -> None:
    """Layers for which one method is several times as fast as the others."""
    assert plans(*conv) == [plan]


def test_sharded_and_complex_convolutions_are_left() -> None:
    conv, x, w = cases.layer((2, 2, 2, 3), (3, 3, 3, 4))
    assert cases.takes(convolution, conv, x.astype(complex), w.astype(complex)) == [False]
    assert cases.takes(convolution, lambda x: lax.conv(x, x, (1, 1), "SAME"), x.astype(int)) == [
        False
    ]
