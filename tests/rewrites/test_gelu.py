"""The error function in gelu, as 1 - erf."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

from functrain.inspect import explain_rewrites
from functrain.rewrites import optimize
from functrain.rewrites._equations import walk_equations
from functrain.rewrites.gelu import MIN_ELEMENTS, gelu

from . import cases

WIDE = jnp.linspace(-12, 12, MIN_ELEMENTS)


def exact_gelu(x: Any) -> Any:
    return jax.nn.gelu(x, approximate=False)


def both(fn: Any) -> Any:
    """The result and its gradient."""

    def run(x: Any, g: Any) -> Any:
        out, pull = jax.vjp(fn, x)
        return out, *pull(g)

    return run


def taken(fn: Any, *args: Any, mode: Any = "auto") -> bool:
    return "gelu" in {row.rule for row in explain_rewrites(fn, *args, rewrites=mode).rows}


@pytest.mark.parametrize("scale", [0.1, 1, 10])
def test_gelu_and_its_gradient_are_as_accurate_as_they_were(scale: float) -> None:
    rng = np.random.default_rng(0)
    x, g = (cases.normal(rng, (8, 16, 256)) for _ in range(2))
    cases.check_accuracy(both(exact_gelu), [scale * x, g], gelu)


def test_below_zero_the_absolute_error_is_bounded_and_the_relative_one_is_not() -> None:
    eps = np.finfo(np.float32).eps
    x = jnp.linspace(-12, 0, 2**18)
    value, gradient = jax.jit(optimize(both(exact_gelu)))(x, jnp.ones_like(x))
    exact_value, exact_gradient = cases.exact(both(exact_gelu), x, jnp.ones_like(x))
    error = np.abs(np.asarray(value, np.float64) - exact_value)
    assert (error <= 2 * eps * np.abs(x)).all()
    assert np.max(np.abs(np.asarray(gradient, np.float64) - exact_gradient)) <= 2 * eps
    between = (x > -5.6) & (x < -3)
    assert np.max(error[between] / np.abs(exact_value[between])) > 1  # docs/performance.md says so


def test_exact_rewrites_keep_the_relative_error_below_zero() -> None:
    x = jnp.linspace(-5.6, -1, 2**16)
    value = np.asarray(jax.jit(optimize(exact_gelu, "exact"))(x), np.float64)
    np.testing.assert_allclose(value, cases.exact(exact_gelu, x), rtol=5e-6)


def test_no_erfc_is_left() -> None:
    after = cases.rewritten(both(exact_gelu), (WIDE, WIDE), gelu)
    names = {eqn.primitive.name for eqn, *_ in walk_equations(after)}
    assert "erf" in names
    assert "erfc" not in names


def test_that_of_keras_is_taken_too() -> None:
    assert taken(lambda x: keras.activations.gelu(x, approximate=False), WIDE)


def test_it_is_taken_in_batches_loops_and_where_it_is_computed_again() -> None:
    def mean(x: Any) -> Any:
        return exact_gelu(x).mean()

    rows = jnp.stack([WIDE, -WIDE])
    assert taken(jax.vmap(both(exact_gelu)), rows, rows)
    assert taken(lambda xs: lax.map(mean, xs), rows)
    assert taken(jax.grad(jax.checkpoint(mean)), WIDE)


HALF = np.float32(np.sqrt(0.5))
LEFT = {
    "its logarithm": lambda x: jnp.log(lax.erfc(-x * HALF)),
    "itself": lambda x: lax.erfc(-x * HALF),
    "gelu and itself": lambda x: ((e := lax.erfc(-x * HALF)), x * e),
    "its logarithm as well": lambda x: x * (e := lax.erfc(-x * HALF)) + jnp.log(e),
    "a multiple of another": lambda x: jnp.sin(x) * lax.erfc(-x * HALF),
    "the other tail": lambda x: x * lax.erfc(x * HALF),
    "another scale": lambda x: x * lax.erfc(-x),
}


@pytest.mark.parametrize("what", LEFT)
def test_where_the_tail_may_matter_it_is_left(what: str) -> None:
    def once(x: Any) -> Any:
        return jax.tree.leaves(LEFT[what](x))

    assert taken(lambda x: x * lax.erfc(-x * HALF), WIDE)
    assert not taken(once, WIDE)


def test_sizes_and_types_decide() -> None:
    assert not taken(exact_gelu, WIDE[1:])
    assert not taken(exact_gelu, WIDE.astype(jnp.bfloat16))


def test_only_auto_takes_it() -> None:
    assert not taken(exact_gelu, WIDE, mode="exact")


def test_nan_and_inf_pass_through_alike() -> None:
    x = WIDE.at[:4].set(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, -0.0]))
    got, want = jax.jit(optimize(exact_gelu))(x), jax.jit(exact_gelu)(x)
    np.testing.assert_array_equal(got[:4], want[:4])


def test_a_scan_of_steps_does_not_depend_on_its_length() -> None:
    rng = np.random.default_rng(0)
    x, w = cases.normal(rng, (64, 16)), cases.normal(rng, (16, 64))
    cases.check_chunks(lambda x, w: exact_gelu(x @ w), x, w)
