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
from functrain.rewrites._equations import walk_equations
from functrain.rewrites._scans import split_inputs
from functrain.rewrites.summed_after import (
    MAX_BYTES,
    MAX_ROWS,
    summed_after,
    summed_after_gpu,
    summed_after_tpu,
)

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


def flat(fn: Any) -> Any:
    """The same of arrays alone, as the judge wants it."""
    return lambda xs, *p: fn(dict(zip(SIZES, p, strict=True)), xs)


def rewritten_scans(fn: Any, *args: Any) -> list[Any]:
    eqns = jax.make_jaxpr(optimize(fn))(*args).eqns
    return [eqn for eqn in eqns if eqn.primitive.name == "scan"]


def carries(fn: Any, *args: Any) -> list[int]:
    """How many each scan has."""
    return [len(split_inputs(eqn.invars, eqn)[1]) for eqn in rewritten_scans(fn, *args)]


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
    cases.check_accuracy(flat(MODELS[model]), args, summed_after)


def test_the_gradients_scan_carries_no_weights() -> None:
    assert carries(layer(), *numbers()) == [1, 1]  # the state, and its gradient
    with mock.patch.dict(MODULE.MAX_BYTES, cpu=0):
        assert carries(layer(), *numbers()) == [1, 5]


def test_the_gradients_scan_sums_nothing() -> None:
    backward = rewritten_scans(layer(), *numbers())[1]
    names = [eqn.primitive.name for eqn, *_ in walk_equations(backward.params["jaxpr"])]
    assert names.count("dot_general") == 1  # the gradient of the state
    assert "reduce_sum" not in names


def test_only_for_a_tpu_an_unrolled_scan_keeps_its_sums() -> None:
    p, xs = numbers()
    unrolled = layer(unroll=len(xs))
    assert cases.takes(summed_after_tpu, layer(), p, xs) == [False, True]
    assert cases.takes(summed_after_tpu, unrolled, p, xs) == [False, False]
    assert cases.takes(summed_after_gpu, unrolled, p, xs) == [False, True]


def test_a_sum_goes_on_from_where_it_began() -> None:
    def fn(xs: Any, w: Any) -> Any:
        return lax.scan(lambda c, x: (c + x.T @ x, x[0]), w, xs)

    rng = np.random.default_rng(0)
    xs, w = cases.normal(rng, (5, 4, 3)), cases.normal(rng, (3, 3)) * 100
    cases.check_accuracy(fn, (xs, w), summed_after)


@pytest.mark.parametrize("steps", [0, 1])
def test_no_rounds_and_one_are_left_as_they_are(steps: int) -> None:
    p, xs = numbers(steps)
    assert cases.takes(summed_after, layer(), p, xs) == [False, False]
    got, want = jax.jit(optimize(layer()))(p, xs), jax.jit(layer())(p, xs)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(g, w)


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
    def taken(
        steps: int, rows: int, columns: int, dtype: Any = jnp.float32, rule: Any = summed_after
    ) -> bool:
        w, xs = ((columns, columns), dtype), ((steps, rows, columns), dtype)
        fn = scan_of(lambda c, x: (c + product(x), None))
        shapes = (jax.ShapeDtypeStruct(*each) for each in (w, xs))
        return cases.takes(rule, fn, *shapes) == [True]

    max_rows, max_steps = int(MAX_ROWS["cpu"]), MAX_BYTES["cpu"] // 1024
    assert taken(2, max_rows, 8)
    assert not taken(2, max_rows + 1, 8)
    assert taken(2, max_rows + 1, 8, rule=summed_after_gpu)
    assert taken(max_steps, 32, 8)
    assert not taken(max_steps + 1, 32, 8)
    assert taken(max_steps + 1, 32, 8, rule=summed_after_tpu)
    assert not taken(4, 4, 8, jnp.bfloat16)


def test_a_scan_of_steps_does_not_depend_on_its_length() -> None:
    p, xs = numbers()

    def step(p: Any, xs: Any) -> Any:
        value, grads = layer()(p, xs)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    scan = jax.jit(lambda p, xs: lax.scan(optimize(step), p, xs))
    chunk = jnp.stack([xs, xs + 1, 2 * xs, -xs])
    half, _ = scan(p, chunk[:2])
    twos, together = scan(half, chunk[2:])[0], scan(p, chunk)[0]
    for a, b in zip(jax.tree.leaves(twos), jax.tree.leaves(together), strict=True):
        np.testing.assert_array_equal(a, b)
