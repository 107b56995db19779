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

from functrain.rewrites import optimize
from functrain.rewrites.max_pool_gradient import MAX_TAPS, max_pool_gradient

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


def expected(pool: Pool, x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns XLA's own result and gradient. The gradient of a NaN is NaN."""
    out, gradient = jax.jit(both(pool))(x, g)
    return out, jnp.where(jnp.isnan(x), x, gradient)


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
    assert cases.takes(max_pool_gradient, fn, *args) == [True]
    for got, want in zip(jax.jit(optimize(fn))(*args), expected(pool, *args), strict=True):
        assert got.dtype == want.dtype
        assert bits(got) == bits(want)


@cases.drawn(5)
@given(pools(apart=False))
def test_windows_that_overlap_are_as_accurate_as_they_were(case: Any) -> None:
    pool, x, g = case
    rng = np.random.default_rng(0)
    args = [cases.normal(rng, x.shape, x.dtype), cases.normal(rng, g.shape, g.dtype)]
    cases.check_accuracy(both(pool), args, max_pool_gradient)


@cases.drawn(4)
@given(pools(apart=False))
def test_ties_and_nan_go_where_they_went(case: Any) -> None:
    """Each window gives a power of two: the sum tells who won."""
    pool, x, g = case
    each = jnp.asarray(2.0 ** (np.arange(g.size) % 20), jnp.float32).reshape(g.shape)
    fn = both(pool)
    x = x.astype(jnp.float32)
    for got, want in zip(jax.jit(optimize(fn))(x, each), expected(pool, x, each), strict=True):
        assert bits(got) == bits(want)


def test_the_rewritten_gradient_keeps_a_nan_that_xla_drops() -> None:
    pool = pooling((1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    rng = np.random.default_rng(0)
    x = cases.normal(rng, (32, 28, 28, 32)).at[1, 0, 0, 2].set(jnp.nan)
    assert not np.isnan(jax.jit(pool)(x)).any()  # if this fails, docs/training.md is out of date
    loss = jax.value_and_grad(lambda x: jnp.sum(pool(x) ** 2))
    _, gradient = jax.jit(optimize(loss))(x)
    assert np.argwhere(np.isnan(gradient[1, :2, :2, 2])).shape == (1, 2)  # in the NaN's window
    assert np.sum(np.isnan(gradient)) == 1


def test_it_survives_vmap_and_remat() -> None:
    pool = pooling((1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    rng = np.random.default_rng(0)
    x, g = cases.normal(rng, (3, 2, 6, 6, 2)), cases.normal(rng, (3, 2, 3, 3, 2))
    fn = jax.vmap(both(jax.checkpoint(pool)))
    names = cases.kinds(jax.make_jaxpr(optimize(fn))(x, g))
    assert "select_and_scatter_add" not in names
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
    assert "select_and_scatter_add" in cases.kinds(closed)


def test_large_windows_are_left_alone() -> None:
    side = int(MAX_TAPS**0.5) + 1
    fn = both(pooling((1, side, side, 1), (1, side, side, 1), "VALID"))
    x, g = jnp.ones((1, side, side, 2)), jnp.ones((1, 1, 1, 2))
    assert cases.takes(max_pool_gradient, fn, x, g) == [False]
