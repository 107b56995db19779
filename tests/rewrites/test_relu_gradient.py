"""Gradients of ReLU and pooling as the rewrites for TPUs compute them, run on a CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun, primitives

from functrain.rewrites._equations import walk_equations

from . import cases
from .test_accelerators import check, primitives_of, rewritten_for_tpu


def pooling(window: int, stride: int, padding: str) -> Callable[..., Any]:
    def fn(x: jax.Array, bias: jax.Array) -> jax.Array:
        shape, strides = (1, window, window, 1), (1, stride, stride, 1)
        return lax.reduce_window(jax.nn.relu(x + bias), -jnp.inf, lax.max, shape, strides, padding)

    return fn


@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [(2, 2, "VALID"), (3, 2, "SAME"), (3, 1, "SAME"), (2, 3, "VALID")],
)
def test_relu_and_bias_in_front_of_pooling_are_decided_for_each_window(
    window: int, stride: int, padding: str
) -> None:
    rng = np.random.default_rng(0)
    x, bias = cases.normal(rng, (2, 9, 9, 3)), cases.normal(rng, (3,))
    weights = cases.normal(rng, jax.eval_shape(pooling(window, stride, padding), x, bias).shape)

    def fn(x: jax.Array, bias: jax.Array, weights: jax.Array) -> Any:
        loss = lambda x, bias: jnp.sum(weights * pooling(window, stride, padding)(x, bias))  # noqa: E731
        return jax.grad(loss, (0, 1))(x, bias)

    closed = check(fn, x, bias, weights)
    small = weights.shape
    compared = [e.outvars[0].aval.shape for e in closed.eqns if e.primitive.name == "gt"]
    # The mask of all numbers is not used any more: the compiler drops it.
    assert set(compared) == {x.shape, small}
    sums = [e.invars[0].aval.shape for e in closed.eqns if e.primitive.name == "reduce_sum"]
    assert small in sums
    assert x.shape not in sums or x.shape == small


@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [
        ((1, 2, 2, 1), (1, 2, 2, 1), ((0, 0), (2, 0), (2, 0), (0, 0))),
        ((1, 2, 2, 1), (1, 2, 2, 2), ((0, 0), (0, 0), (0, 0), (0, 0))),
    ],
    ids=["windows of padding", "features that are left out"],
)
def test_the_gradient_of_a_bias_sums_only_numbers_that_reach_it(
    window: Any, strides: Any, padding: Any
) -> None:
    def pool(x: jax.Array, bias: jax.Array) -> jax.Array:
        return lax.reduce_window(x + bias, -jnp.inf, lax.max, window, strides, padding)

    rng = np.random.default_rng(0)
    x, bias = cases.normal(rng, (2, 8, 8, 3)), cases.normal(rng, (3,))
    source = cases.normal(rng, jax.eval_shape(pool, x, bias).shape)

    def gradient(bias: jax.Array, x: jax.Array, source: jax.Array) -> Any:
        return jax.vjp(lambda bias: pool(x, bias), bias)[1](source)

    closed = rewritten_for_tpu(gradient, bias, x, source)
    sums = [e.invars[0].aval.shape for e in closed.eqns if e.primitive.name == "reduce_sum"]
    assert x.shape in sums


def test_pooling_that_is_computed_after_its_gradient_is_no_input_of_it() -> None:
    windows = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1)}

    def fn(x: jax.Array, source: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = jnp.maximum(x, 0)
        spread = primitives.select_and_scatter_add_p.bind(
            source, output, select_prim=primitives.ge_p, padding=((0, 0),) * 4, **windows
        )
        gradient = lax.select(x > 0, spread, jnp.zeros_like(x))
        return gradient, lax.reduce_window(output, -jnp.inf, lax.max, **windows, padding="VALID")

    rng = np.random.default_rng(0)
    check(fn, cases.normal(rng, (2, 8, 8, 3)), cases.normal(rng, (2, 4, 4, 3)))


def test_another_activation_in_front_of_pooling_is_kept() -> None:
    def fn(x: jax.Array) -> jax.Array:
        pooled = lax.reduce_window(
            jnp.where(x > 0, x, 0.1 * x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        return jnp.sum(pooled**2)

    x = cases.normal(np.random.default_rng(0), (2, 8, 8, 3))
    closed = check(jax.grad(fn), x)
    (spread,) = (
        eqn for eqn, *_ in walk_equations(closed) if eqn.primitive.name.startswith("select_and_sc")
    )
    assert spread.invars[0].aval.shape == (2, 4, 4, 3)
    assert "gt" in primitives_of(closed)


def members(relu: Callable[..., Any], x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the squared outputs of three members that share a batch."""
    return jnp.sum(jax.vmap(lambda w: relu(x @ w) @ w)(w) ** 2)


@pytest.mark.parametrize("relu", [jax.nn.relu, keras.ops.relu])
def test_the_gradient_of_the_relu_of_members_is_decided_by_its_output(relu: Any) -> None:
    rng = np.random.default_rng(0)
    x, w = cases.normal(rng, (8, 16)), cases.normal(rng, (3, 16, 16))
    names = primitives_of(check(jax.grad(lambda w, x: members(relu, x, w)), w, x))
    assert ("ge" in names, "gt" in names) == (True, False)


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-37, -1e-37])
def test_the_mask_of_relu_is_that_of_its_input(value: float) -> None:
    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jax.nn.relu(x) @ w))(x)

    x, w = jnp.full((2, 3, 4), value, jnp.float32), jnp.ones((2, 4, 5))
    rewritten = rewritten_for_tpu(gradient, x, w)
    assert "gt" not in primitives_of(rewritten)
    np.testing.assert_array_equal(
        jax.jit(jaxpr_as_fun(rewritten))(x, w)[0], jax.jit(gradient)(x, w)
    )


@pytest.mark.parametrize(("dtype", "is_kept"), [("float16", True), ("bfloat16", False)])
def test_small_numbers_of_float16_keep_their_gradient(dtype: str, is_kept: bool) -> None:
    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jax.nn.relu(x) @ w).astype(jnp.float32))(x)

    x, w = jnp.full((2, 3, 4), 3e-5, dtype), jnp.ones((2, 4, 5), dtype)
    rewritten = rewritten_for_tpu(gradient, x, w)
    assert ("gt" in primitives_of(rewritten)) == is_kept
    np.testing.assert_array_equal(jaxpr_as_fun(rewritten)(x, w)[0], gradient(x, w))


def test_comparisons_with_zero_that_are_no_masks_of_members_are_kept() -> None:
    x, w = jnp.linspace(-1, 1, 18).reshape(2, 3, 3), jnp.ones((2, 3, 3))
    for fn in (
        lambda x: (x @ w, x > 0),
        lambda x: (jnp.maximum(x, 1) @ w, x > 0),
        lambda x: (jnp.maximum(x, 0) @ w, x > 1),
        lambda x: (jnp.maximum(2 * x, 0) @ w, x > 0),
        lambda x: (jnp.maximum(x, 0) @ w[0], x > 0),
        lambda x: (jnp.maximum(x, 0) + w, x > 0),
    ):
        assert "gt" in primitives_of(rewritten_for_tpu(fn, x))
