"""Sums of products over the rounds of a scan, taken after it."""

import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from functrain.rewrites import optimize
from functrain.rewrites._equations import split_inputs
from functrain.rewrites.summed_after import MAX_BYTES, MAX_ROWS, summed_after

from . import cases

MODULE = importlib.import_module("functrain.rewrites.summed_after")
SIZES = {"in": (3, 8), "own": (8, 8), "bias": (8,), "row": (1, 8)}


def cell(p: Any, h: Any, x: Any) -> Any:
    """A recurrent cell with two weights and two biases, one of them a row, as Keras has it."""
    return jnp.tanh(x @ p["in"] + h @ p["own"] + p["bias"] + p["row"])


def layer(reverse: bool = False, unroll: int = 1) -> Any:
    def loss(p: Any, xs: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            h = cell(p, h, x)
            return h, h

        start = jnp.zeros((xs.shape[1], 8), xs.dtype)
        h, hs = lax.scan(body, start, xs, reverse=reverse, unroll=unroll)
        return jnp.sum(h**2) + jnp.mean(hs)

    return jax.value_and_grad(loss)


def deep(p: Any, xs: Any) -> Any:
    """A scan in a scan: the inner one goes over parts of the features."""

    def loss(p: Any) -> Any:
        def outer(h: Any, x: Any) -> Any:
            parts = jnp.stack([x, 2 * x, x * x])
            return lax.scan(lambda h, part: (cell(p, h, part), None), h, parts)[0], None

        return jnp.sum(lax.scan(outer, jnp.zeros((xs.shape[1], 8), xs.dtype), xs)[0] ** 2)

    return jax.value_and_grad(loss)(p)


def numbers(steps: int = 6, rows: int = 4) -> tuple[Any, jax.Array]:
    rng = np.random.default_rng(0)
    weights = {name: cases.normal(rng, size) / 3 for name, size in SIZES.items()}
    return weights, cases.normal(rng, (steps, rows, 3))


MODELS = {
    "forward": layer(),
    "reverse": layer(reverse=True),
    "unrolled": layer(unroll=2),
    "scan in scan": deep,
    "a batch of layers": jax.vmap(layer(), in_axes=(None, 2)),
}


@pytest.mark.parametrize("model", MODELS)
def test_it_is_as_accurate_as_it_was(model: str) -> None:
    p, xs = numbers()
    args = [jnp.stack([xs, -xs], 2) if "batch" in model else xs, *p.values()]
    # The judge wants arrays alone.
    flat = lambda xs, *p: MODELS[model](dict(zip(SIZES, p, strict=True)), xs)  # noqa: E731
    cases.check_accuracy(flat, args, summed_after)


def test_the_gradients_scan_carries_no_weights() -> None:
    def carries() -> list[int]:
        eqns = jax.make_jaxpr(optimize(layer()))(*numbers()).eqns
        scans = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
        return [len(split_inputs(eqn.invars, eqn)[1]) for eqn in scans]

    assert carries() == [1, 1]  # the state, and its gradient
    with mock.patch.object(MODULE, "MAX_BYTES", 0):
        assert carries() == [1, 5]


def test_a_sum_goes_on_from_where_it_began() -> None:
    def fn(xs: Any, w: Any) -> Any:
        return lax.scan(lambda c, x: (c + x.T @ x, x[0]), w, xs)

    rng = np.random.default_rng(0)
    xs, w = cases.normal(rng, (5, 4, 3)), cases.normal(rng, (3, 3)) * 100
    cases.check_accuracy(fn, (xs, w), summed_after)


def scan_of(body: Any) -> Any:
    return lambda w, xs: lax.scan(body, w, xs)


def product(x: Any) -> Any:
    return lax.dot_general(x, x, (((0,), (0,)), ((), ())))


LEFT = {
    "it is read": scan_of(lambda c, x: (c + product(x), c[0])),
    "its sum is an output": scan_of(lambda c, x: ((c := c + product(x)), c)),
    "it decays": scan_of(lambda c, x: (0.9 * c + product(x), None)),
    "it is added to itself": scan_of(lambda c, x: (c + c, product(x))),
    "its terms are no products": scan_of(lambda c, x: (c + x[0], None)),
    "its terms are functions of products": scan_of(lambda c, x: (c + jnp.tanh(product(x)), None)),
    "a factor is the same in all rounds": lambda w, xs: lax.scan(
        lambda c, x: (c + w @ x[:3], None), w, xs
    ),
    "it says something": scan_of(
        lambda c, x: (jax.debug.callback(lambda: None), (c + product(x), None))[1]
    ),
}


@pytest.mark.parametrize("why", LEFT)
def test_other_carries_are_left(why: str) -> None:
    xs = jnp.ones((5, 4, 3))
    assert cases.takes(summed_after, scan_of(lambda c, x: (c + product(x), None)), xs[0, :3], xs)[0]
    assert cases.takes(summed_after, LEFT[why], xs[0, :3], xs) == [False]


def test_the_sizes_decide() -> None:
    def taken(steps: int, rows: int, columns: int, dtype: Any = jnp.float32) -> bool:
        w, xs = ((columns, columns), dtype), ((steps, rows, columns), dtype)
        fn = scan_of(lambda c, x: (c + product(x), None))
        shapes = (jax.ShapeDtypeStruct(*each) for each in (w, xs))
        return cases.takes(summed_after, fn, *shapes) == [True]

    max_steps = MAX_BYTES // 1024
    assert [taken(2, rows, 8) for rows in (MAX_ROWS, MAX_ROWS + 1)] == [True, False]
    assert [taken(steps, 32, 8) for steps in (1, max_steps, max_steps + 1)] == [False, True, False]
    assert not taken(4, 4, 8, jnp.bfloat16)
