"""Values of all iterations of a scan, computed before and after it, for TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from functrain.rewrites._equations import walk_equations
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._scans import split_inputs
from functrain.rewrites.batched_over_time import batched_over_time
from functrain.rewrites.summed_after import summed_after_tpu
from functrain.rewrites.unrolled_scan import unrolled_scan

from . import cases, recurrent


def scans(fn: Any, *args: Any) -> list[Any]:
    """Returns the scans of a function after the rewrite."""
    jaxpr = rewrite_jaxpr(jax.make_jaxpr(fn)(*args), [summed_after_tpu, batched_over_time])
    return [eqn for eqn, *_ in walk_equations(jaxpr) if eqn.primitive.name == "scan"]


@pytest.mark.parametrize("model", recurrent.MODELS)
def test_it_is_as_accurate_as_it_was(model: str) -> None:
    fn, args = recurrent.MODELS[model], recurrent.numbers()
    cases.check_accuracy(fn, args, summed_after_tpu, batched_over_time)


def test_only_carries_are_stacked() -> None:
    forward, backward = scans(recurrent.MODELS["lstm"], *recurrent.numbers())
    assert len(forward.outvars) == 4  # the last h and c, and those of all iterations
    products = [eqn for eqn in forward.params["jaxpr"].eqns if eqn.primitive.name == "dot_general"]
    assert len(products) == 1  # that of the carry: those of the inputs are computed before
    assert len(split_inputs(backward.invars, backward)[1]) == 2


def test_nan_stays_where_it_is() -> None:
    xs, *weights = recurrent.numbers()
    args = [xs.at[3, 1].set(jnp.nan), *weights]
    fn = recurrent.MODELS["lstm"]
    jaxpr = rewrite_jaxpr(jax.make_jaxpr(fn)(*args), [batched_over_time])
    got = jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))(*args)
    for new, old in zip(got, jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_array_equal(np.isnan(new), np.isnan(old))
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


def scan(body: Any, **options: Any) -> Any:
    return lambda c, xs: lax.scan(body, c, xs, **options)


def gate(c: Any, x: Any) -> Any:
    new = jnp.tanh(c + x)
    return new, (new * x, jnp.exp(new))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_constant_and_an_input_may_be_outputs(reverse: bool) -> None:
    def fn(c: Any, xs: Any) -> Any:
        return lax.scan(
            lambda c, x: (gate(c, x)[0], (*gate(c, x)[1], c, 1.0, x)), c, xs, reverse=reverse
        )

    rng = np.random.default_rng(0)
    cases.check_accuracy(fn, (cases.normal(rng, 3), cases.normal(rng, (5, 3))), batched_over_time)


def test_an_array_from_outside_of_the_loop_may_be_an_output() -> None:
    def fn(c: Any, xs: Any, w: Any) -> Any:
        return lax.scan(lambda c, x: (gate(c, x)[0], (*gate(c, x)[1], w)), c, xs)

    rng = np.random.default_rng(0)
    args = cases.normal(rng, 3), cases.normal(rng, (5, 3)), cases.normal(rng, 3)
    cases.check_accuracy(fn, args, batched_over_time)


def noisy(c: Any, x: Any) -> Any:
    new = jnp.tanh(c + x)
    return new, (new + jax.random.normal(jax.random.key(0), (3,)), jnp.exp(new))


def says(c: Any, x: Any) -> Any:
    jax.debug.callback(lambda: None)
    return gate(c, x)


LEFT = {
    "of random numbers": scan(noisy),
    "with effects": scan(says),
    "unrolled": scan(gate, unroll=5),
    "whose outputs are its carries": scan(lambda c, x: (jnp.tanh(c + x), c)),
    "with fewer outputs than carries": scan(
        lambda c, x: ((jnp.tanh(c[1] + x), jnp.cos(c[0])), jnp.exp(c[0] + c[1]))
    ),
    "of large arrays": scan(
        lambda c, x: (gate(c, x)[0], (*gate(c, x)[1], jnp.sum(jnp.outer(c, jnp.ones(2**18)))))
    ),
}


@pytest.mark.parametrize("kind", LEFT)
def test_other_scans_are_left(kind: str) -> None:
    c, xs = jnp.ones(3), jnp.ones((5, 3))
    assert cases.takes(batched_over_time, scan(gate), c, xs) == [True]
    start = (c, c) if "fewer" in kind else c
    assert cases.takes(batched_over_time, LEFT[kind], start, xs) == [False]


def test_a_product_of_constants_stays_in_the_loop() -> None:
    def fn(w: Any, xs: Any) -> Any:
        return lax.scan(lambda c, x: (jnp.tanh(c @ (w @ w) + x), None), xs[0], xs)

    assert not any(cases.takes(batched_over_time, fn, jnp.ones((3, 3)), jnp.ones((5, 2, 3))))


def test_an_unrolled_scan_stays_unrolled() -> None:
    jaxpr = jax.make_jaxpr(recurrent.MODELS["lstm"])(*recurrent.numbers())
    rules = [unrolled_scan, summed_after_tpu, batched_over_time]
    assert str(rewrite_jaxpr(jaxpr, rules)) == str(rewrite_jaxpr(jaxpr, rules[:1]))
