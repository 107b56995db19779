"""Ungrouped convolutions: another layout, the same bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

from functrain.rewrites import optimize
from functrain.rewrites._conv import canonical_numbers
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites.canonical_conv import canonical_conv

from . import cases
from .cases import normal


def same(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.weak_type) == (w.dtype, w.weak_type)
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def numbers(jaxpr: Any) -> list[lax.ConvDimensionNumbers]:
    return [
        eqn.params["dimension_numbers"]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "conv_general_dilated"
    ]


DRAWN = cases.convolutions(
    sides=(4, 4), ranks=(0, 1, 2, 3), strides=(1, 2), sizes=(5, 8), pads=(-1, 2)
)


@cases.drawn(12)
@given(DRAWN)
def test_no_bit_changes_under_jit(case: Any) -> None:
    conv, (x, w, _) = case
    same(jax.jit(optimize(conv, "exact"))(x, w), jax.jit(conv)(x, w))


@cases.drawn(12)
@given(DRAWN)
def test_all_become_canonical(case: Any) -> None:
    conv, (x, w, _) = case
    after = rewrite_jaxpr(jax.make_jaxpr(conv)(x, w), [canonical_conv])
    assert numbers(after) == [canonical_numbers(x.ndim)]
    assert rewrite_jaxpr(after, [canonical_conv]) is after


LAYERS = {
    "same": ((2, 8, 8, 3), (3, 3, 3, 4), {"padding": "SAME"}),
    "strided": ((2, 9, 9, 3), (3, 3, 3, 4), {"padding": "SAME", "window_strides": (2, 2)}),
    "dilated": ((2, 9, 9, 3), (3, 3, 3, 4), {"padding": "VALID", "rhs_dilation": (2, 2)}),
    "transposed": ((2, 5, 5, 3), (4, 4, 3, 4), {"padding": [(2, 2)] * 2, "lhs_dilation": (2, 2)}),
    "1-D": ((2, 16, 3), (5, 3, 4), {"padding": "SAME"}),
    "3-D": ((2, 5, 5, 5, 3), (3, 3, 3, 3, 4), {"padding": "SAME"}),
    "1 x 1": ((2, 8, 8, 3), (1, 1, 3, 4), {"padding": "VALID"}),
}


def training(layer: str, dtype: Any) -> tuple[Callable[..., Any], Any, jax.Array]:
    """A step of gradient descent, its state, and 3 batches."""
    image, kernel, options = LAYERS[layer]
    options = {"window_strides": (1,) * (len(image) - 2), **options}
    axes = canonical_numbers(len(image))
    rng = np.random.default_rng(0)
    xs = normal(rng, (3, *image), dtype)
    params = [normal(rng, kernel, dtype), normal(rng, (*kernel[:-2], 4, 3), dtype)]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = lax.conv_general_dilated(x, w, dimension_numbers=axes, **options)
            x = jax.nn.relu(x)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - jnp.asarray(0.01, p.dtype) * g, params, grads), value

    return step, params, xs


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.long)])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_scan_of_steps_is_the_jitted_step_to_the_bit(layer: str, dtype: Any) -> None:
    step, params, xs = training(layer, dtype)
    better = optimize(step, "exact")
    plain, single = jax.jit(step), jax.jit(better)
    scan = jax.jit(lambda params, xs: lax.scan(better, params, xs))
    want, got, ones = params, params, params
    for i in range(3):
        want, loss = plain(want, xs[i])
        got, better_loss = single(got, xs[i])
        ones, one_loss = scan(ones, xs[i : i + 1])
        same(better_loss, loss)
        same(one_loss[0], loss)
    same(got, want)
    same(ones, want)
    same(scan(params, xs)[0], want)


def test_gradient_convolutions_are_rewritten() -> None:
    step, params, xs = training("same", jnp.float32)
    before = jax.make_jaxpr(step)(params, xs[0])
    after = rewrite_jaxpr(before, [canonical_conv])
    assert len(numbers(before)) == len(numbers(after)) == 5
    assert set(numbers(after)) == {canonical_numbers(4)} != set(numbers(before))


def test_a_canonical_or_grouped_one_is_left_alone() -> None:
    for layer in (
        cases.layer((1, 4, 4, 4), (3, 3, 4, 8)),
        cases.layer((1, 4, 4, 4), (3, 3, 2, 8), feature_group_count=2),
    ):
        assert cases.takes(canonical_conv, *layer) == [False]


def test_precision_result_type_nan_and_inf_are_kept() -> None:
    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv(
            x, w, (1, 1), "SAME", precision="highest", preferred_element_type=jnp.float32
        )

    rng = np.random.default_rng(0)
    x, w = normal(rng, (2, 3, 6, 6), jnp.bfloat16), normal(rng, (4, 3, 3, 3), jnp.bfloat16)
    x = x.at[0, 1, 4, 4].set(jnp.nan).at[1, 0, 2, 5].set(jnp.inf)
    params = rewrite_jaxpr(jax.make_jaxpr(conv)(x, w), [canonical_conv]).eqns[2].params
    assert params["precision"] == (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    same(jax.jit(optimize(conv, "exact"))(x, w), jax.jit(conv)(x, w))
