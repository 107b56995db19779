"""Maximum pooling and its gradient: other operations, the same bits, ties and NaN included."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun

from functrain.inspect import explain_rewrites
from functrain.rewrites import optimize
from functrain.rewrites._equations import walk_equations
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._windows import MAX_POOL_TAPS
from functrain.rewrites.max_pool import max_pool, max_pool_apart
from functrain.rewrites.max_pool_gradient import (
    max_pool_gradient,
    max_pool_gradient_apart,
)

from . import cases

ODD = [-1.0, -0.0, 0.0, 1.0, 1.0, 2.0, np.inf, -np.inf, np.nan]
Pool = Callable[[jax.Array], jax.Array]


def pooling(window: Any, strides: Any, padding: Any) -> Pool:
    def pool(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

    return pool


def both(pool: Pool) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    def fn(x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, pull = jax.vjp(pool, x)
        return out, *pull(g)

    return fn


def bits(x: jax.Array) -> bytes:
    """All of them, but any NaN is a NaN."""
    array = np.asarray(x)
    return np.where(np.isnan(array), np.array(7, array.dtype), array).tobytes()


@st.composite
def pools(draw: st.DrawFn, apart: bool) -> tuple[Pool, jax.Array, jax.Array]:
    rank = draw(st.sampled_from((1, 2, 2, 3)))
    each = lambda values: draw(st.tuples(*[values] * rank))  # noqa: E731
    window = each(st.integers(1, 3))
    window = window if max(window) > 1 else (2, *window[1:])
    strides = window if apart else each(st.integers(1, 3))
    padding = draw(st.sampled_from(("SAME", "VALID", "LOW")))
    if padding == "LOW":
        padding = [(0, 0), *[(min(1, w - 1), 0) for w in window], (0, 0)]
    shape = draw(st.integers(1, 3)), *each(st.integers(4, 8)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from((jnp.float32, jnp.bfloat16, jnp.float16)))
    pool = pooling((1, *window, 1), (1, *strides, 1), padding)
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def numbers(shape: Any) -> jax.Array:
        odd = draw(st.booleans())
        return jnp.asarray(rng.choice(ODD, shape) if odd else rng.normal(size=shape), dtype)

    return pool, numbers(shape), numbers(jax.eval_shape(pool, jnp.zeros(shape)).shape)


@cases.drawn(5)
@given(pools(apart=True))
def test_windows_apart_keep_every_bit(case: Any) -> None:
    pool, *args = case
    fn = both(pool)
    for rule in (max_pool_apart, max_pool_gradient):
        assert cases.takes(rule, fn, *args) == [True]
    assert cases.takes(max_pool, fn, *args) == [False]
    for got, want in zip(jax.jit(optimize(fn))(*args), jax.jit(fn)(*args), strict=True):
        assert got.dtype == want.dtype
        assert bits(got) == bits(want)


@cases.drawn(5)
@given(pools(apart=False))
def test_windows_that_overlap_are_as_accurate_as_they_were(case: Any) -> None:
    pool, x, g = case
    rng = np.random.default_rng(0)
    args = [cases.normal(rng, x.shape, x.dtype), cases.normal(rng, g.shape, g.dtype)]
    cases.check_accuracy(both(pool), args, max_pool, max_pool_apart, max_pool_gradient)


@cases.drawn(4)
@given(pools(apart=False))
def test_ties_and_nan_go_where_they_went(case: Any) -> None:
    """Each window gives a power of two: the sum tells who won."""
    pool, x, g = case
    each = jnp.asarray(2.0 ** (np.arange(g.size) % 20), jnp.float32).reshape(g.shape)
    fn = both(pool)
    x = x.astype(jnp.float32)
    for got, want in zip(jax.jit(optimize(fn))(x, each), jax.jit(fn)(x, each), strict=True):
        assert bits(got) == bits(want)


def test_the_rewritten_gradient_keeps_a_nan_that_xla_drops() -> None:
    pool = pooling((1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    rng = np.random.default_rng(0)
    x = cases.normal(rng, (32, 28, 28, 32)).at[1, 0, 0, 2].set(jnp.nan)
    assert not np.isnan(jax.jit(pool)(x)).any()  # if this fails, docs/training.md is out of date
    loss = jax.value_and_grad(lambda x: jnp.sum(pool(x) ** 2))
    value, gradient = jax.jit(optimize(loss))(x)
    assert np.isnan(value)
    assert np.argwhere(np.isnan(gradient[1, :2, :2, 2])).shape == (1, 2)  # in the NaN's window
    assert np.sum(np.isnan(gradient)) == 1


def test_it_survives_vmap_and_remat() -> None:
    pool = pooling((1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    rng = np.random.default_rng(0)
    x, g = cases.normal(rng, (3, 2, 6, 6, 2)), cases.normal(rng, (3, 2, 3, 3, 2))
    fn = jax.vmap(both(jax.checkpoint(pool)))
    names = cases.kinds(jax.make_jaxpr(optimize(fn))(x, g))
    assert not {"reduce_window_max", "select_and_scatter_add"} & set(names)
    for got, want in zip(jax.jit(optimize(fn))(x, g), jax.jit(fn)(x, g), strict=True):
        assert bits(got) == bits(want)


@pytest.mark.parametrize(("taps", "strides"), [(2, 2), (3, 2)])
def test_a_scan_of_steps_does_not_depend_on_its_length(taps: int, strides: int) -> None:
    conv, x, w = cases.layer((2, 8, 8, 3), (3, 3, 3, 4))
    pool = pooling((1, taps, taps, 1), (1, strides, strides, 1), "VALID")
    cases.check_chunks(lambda x, w: pool(conv(x, w)), x, w)


def test_exact_leaves_them_for_what_the_compiler_fuses_with_them() -> None:
    fn = both(pooling((1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
    x, g = jnp.ones((1, 6, 6, 2)), jnp.ones((1, 3, 3, 2))
    closed = jax.make_jaxpr(optimize(fn, "exact"))(x, g)
    assert {"reduce_window_max", "select_and_scatter_add"} <= set(cases.kinds(closed))


def test_large_windows_and_integers_are_left_alone() -> None:
    side = int(MAX_POOL_TAPS**0.5) + 1
    fn = both(pooling((1, side, side, 1), (1, side, side, 1), "VALID"))
    x, g = jnp.ones((1, side, side, 2)), jnp.ones((1, 1, 1, 2))
    for rule in (max_pool, max_pool_apart, max_pool_gradient):
        assert cases.takes(rule, fn, x, g) == [False]

    def pool(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -100, lax.max, (2,), (2,), "VALID")

    assert cases.takes(max_pool_apart, pool, jnp.arange(4)) in ([], [False])


@pytest.mark.parametrize("stays", [True, False])
def test_without_a_gradient_windows_apart_stay_as_they_are(stays: bool) -> None:
    size = 2 if stays else 3
    pool = pooling((1, size, size, 1), (1, 2, 2, 1), "VALID")
    x, g = jnp.ones((1, 7, 7, 2)), jnp.ones((1, 3, 3, 2))
    for fn, left in ((lambda x, g: jax.jit(pool)(x) * g, stays), (both(pool), False)):
        closed = jax.make_jaxpr(optimize(fn))(x, g)
        kinds = [eqn.primitive.name for eqn, *_ in walk_equations(closed)]
        assert ("reduce_window_max" in kinds) == left
        assert [row.rule == "" for row in explain_rewrites(fn, x, g).rows][:1] == [left]


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_on_a_gpu_gradients_of_windows_side_by_side_keep_every_bit(padding: str) -> None:
    fn = both(pooling((1, 2, 2, 1), (1, 2, 2, 1), padding))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.choice(ODD, (2, 7, 6, 3)), jnp.float32)
    g = cases.normal(rng, jax.eval_shape(pooling((1, 2, 2, 1), (1, 2, 2, 1), padding), x).shape)
    closed = rewrite_jaxpr(jax.make_jaxpr(fn)(x, g), [max_pool_gradient_apart])
    assert "select_and_scatter_add" not in cases.kinds(closed)
    for got, want in zip(jax.jit(jaxpr_as_fun(closed))(x, g), jax.jit(fn)(x, g), strict=True):
        assert bits(got) == bits(want)


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_on_a_gpu_gradients_of_other_windows_are_left(stride: int) -> None:
    pool = pooling((1, 3, 3, 1), (1, stride, stride, 1), "VALID")
    x = jnp.ones((1, 9, 9, 2))
    assert cases.takes(max_pool_gradient_apart, both(pool), x, pool(x)) == [False]
