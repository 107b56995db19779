"""Short scans of small bodies without a loop, for TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import functrain.rewrites.unrolled_scan as module
from functrain.rewrites._equations import walk_equations
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites.unrolled_scan import unrolled_scan

from . import cases


def factors(rule: Any, fn: Any, *args: Any) -> list[int]:
    """Returns how many iterations each scan runs at once, after the rewrite."""
    jaxpr = rewrite_jaxpr(jax.make_jaxpr(fn)(*args), [rule])
    return [e.params["unroll"] for e, *_ in walk_equations(jaxpr) if e.primitive.name == "scan"]


def scan(steps: int, body: Any = lambda c, x: (jnp.tanh(c + x), c), **options: Any) -> Any:
    return lambda c, x: lax.scan(body, c, jnp.broadcast_to(x, (steps, *x.shape)), **options)


def recurrent(xs: Any, *weights: Any, reverse: bool = False) -> Any:
    """Returns the loss of a masked recurrent layer, its outputs, and the gradients."""

    def loss(weights: Any, xs: Any) -> Any:
        into, own, bias = weights

        def cell(h: Any, x: Any) -> Any:
            new = jnp.tanh(x @ into + h @ own + bias)
            h = jnp.where(x[..., :1] > -0.5, new, h)
            return h, h

        last, hs = lax.scan(cell, jnp.zeros((xs.shape[1], 8), xs.dtype), xs, reverse=reverse)
        return jnp.sum(last**2) + jnp.mean(hs), hs

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, xs)


def numbers() -> list[jax.Array]:
    """Returns inputs `[T, B, 3]` and the weights."""
    rng = np.random.default_rng(0)
    weights = [cases.normal(rng, size) / 2 for size in ((3, 8), (8, 8), (8,))]
    return [cases.normal(rng, (4, 4, 3)), *weights]


@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_as_accurate_as_it_was(reverse: bool) -> None:
    fn = functools.partial(recurrent, reverse=reverse)
    cases.check_accuracy(fn, numbers(), unrolled_scan)


def test_nan_stays_where_it_is() -> None:
    xs, *weights = numbers()
    args = [xs.at[3, 1].set(jnp.nan), *weights]
    run = jax.extend.core.jaxpr_as_fun(
        rewrite_jaxpr(jax.make_jaxpr(recurrent)(*args), [unrolled_scan])
    )
    for got, want in zip(
        jax.jit(run)(*args), jax.tree.leaves(jax.jit(recurrent)(*args)), strict=True
    ):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_length_decides() -> None:
    longest = module.MAX_EQUATIONS // 2
    x = jnp.ones(3)
    assert factors(unrolled_scan, scan(longest), x, x) == [longest]
    assert factors(unrolled_scan, scan(longest + 1), x, x) == [1]


def test_the_scans_inside_a_scan_count() -> None:
    def body(c: Any, x: Any) -> Any:
        return scan(100)(c, x)[0], None

    x = jnp.ones(3)
    assert factors(unrolled_scan, scan(5, body), x, x) == [5, 100]
    # The outer one would be too long; the inner one is not.
    assert factors(unrolled_scan, scan(50, body), x, x) == [1, 100]


def normal(c: Any, x: Any) -> Any:
    return c + jax.random.normal(jax.random.key(0), c.shape), None


def says(c: Any, x: Any) -> Any:
    jax.debug.callback(lambda: None)
    return c + x, None


LEFT = {
    "of one iteration": scan(1),
    "of no iteration": scan(0),
    "unrolled by the user": scan(6, unroll=2),
    "with effects": scan(6, says),
    "of random numbers": scan(64, normal),
    "of large arrays": scan(6, lambda c, x: (c + jnp.sum(jnp.outer(x, jnp.ones(2**18))), None)),
}


@pytest.mark.parametrize("kind", LEFT)
def test_other_scans_are_left(kind: str) -> None:
    x = jnp.ones(3)
    assert cases.takes(unrolled_scan, scan(6), x, x) == [True]
    assert not any(cases.takes(unrolled_scan, LEFT[kind], x, x))
