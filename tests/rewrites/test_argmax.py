"""Where the largest and the smallest number are: the same index, ties, zeros and NaN included."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from functrain.rewrites import optimize
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites.argmax import MAX_LENGTH, MIN_LENGTH, argmax, argmin

from . import cases

ODD = [-1.0, -0.0, 0.0, 1.0, 1.0, 1e-42, -1e-42, np.inf, -np.inf, np.nan]
RULES = {lax.argmax: argmax, lax.argmin: argmin}
FINDS = pytest.mark.parametrize("find", RULES)


def check_equal(fn: Any, *args: Any) -> None:
    """The same bits under jit, and nothing is left of the two."""
    closed = rewrite_jaxpr(jax.make_jaxpr(fn)(*args), [argmax, argmin])
    assert not re.search(r"\barg(max|min)\[", str(closed))
    got, want = jax.jit(optimize(fn))(*args), jax.jit(fn)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.weak_type) == (w.dtype, w.weak_type)
        np.testing.assert_array_equal(g, w)


@FINDS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@cases.drawn(4)
@given(data=st.data())
def test_the_first_extremum_is_found(find: Any, dtype: str, data: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = [3] * data.draw(st.integers(0, 2))
    axis = data.draw(st.integers(0, len(shape)))
    shape.insert(axis, data.draw(st.integers(MIN_LENGTH, 2 * MIN_LENGTH + 1)))
    some = ODD[: data.draw(st.integers(1, len(ODD)))]  # one: all equal; all: with NaN
    index = data.draw(st.sampled_from(("int32", "uint8", "int16")))
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(rng.choice(some, shape), dtype)
        check_equal(lambda x: find(x, axis, jnp.dtype(index)), x)


@FINDS
@pytest.mark.parametrize("value", ODD)
def test_of_equals_the_first_wins(find: Any, value: float) -> None:
    far = -np.inf if find is lax.argmax else np.inf
    x = np.full((4, 100), far, np.float32)
    x[0, [0, 99]] = x[1, [40, 70]] = x[2, 99] = value
    x[3, [70, 80]] = value, np.nan
    check_equal(lambda x: find(x, 1, jnp.int32), jnp.asarray(x))


# What comes before is fused with the reductions, and has to be one number to both of them.
BEFORE = {
    "scaled and moved": lambda x, w: x * w[0] + w[1],
    "dense": lambda x, w: x @ w.T @ w + w[0],
    "softmax": lambda x, w: jax.nn.softmax(x * w[0]),
    "gelu": lambda x, w: jax.nn.gelu(x * w[0] + w[1]),
    "standardized": lambda x, w: jax.nn.standardize(x + w[0]) * w[1] + w[2],
    "a gradient": lambda x, w: jax.grad(lambda x: jnp.sum(jnp.tanh(x * w[0]) ** 2))(x),
}


def after(x: Any, w: Any) -> Any:
    values = {name: before(x, w) for name, before in BEFORE.items()}
    return {n: (jnp.argmax(y, -1), jnp.argmin(y, -1), jnp.argmax(y, 0)) for n, y in values.items()}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_computed_just_before_is_one_number_to_both_passes(dtype: str) -> None:
    rng = np.random.default_rng(0)
    shapes = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((65, 37), (4, 37)))
    assert "argm" not in str(jax.make_jaxpr(optimize(after, "exact"))(*shapes))
    check_equal(after, cases.normal(rng, (65, 37), dtype), cases.normal(rng, (4, 37), dtype))


def test_in_bfloat16_a_largest_is_found_but_among_equals_another() -> None:
    """XLA compares it unrounded where it is fused with what comes before."""
    rng = np.random.default_rng(0)
    x, w = (cases.normal(rng, shape, jnp.bfloat16) for shape in ((65, 37), (4, 37)))
    assert "argmax" in cases.kinds(jax.make_jaxpr(optimize(after, "exact"))(x, w))
    assert "argmax" not in cases.kinds(jax.make_jaxpr(optimize(after))(x, w))
    found = jax.jit(optimize(after))(x, w)
    for name, before in BEFORE.items():
        y = np.asarray(jax.jit(before)(x, w), np.float32)
        chosen = np.take_along_axis(y, np.asarray(found[name][0])[:, None], -1)[:, 0]
        np.testing.assert_allclose(chosen, y.max(-1), rtol=float(jnp.finfo(jnp.bfloat16).eps))


def loss_and_hits(w: Any, x: Any, y: Any) -> tuple[Any, Any]:
    scores = jnp.tanh(x @ w["in"]) @ w["out"] + w["bias"]
    log = jax.nn.log_softmax(scores.astype(jnp.float32))
    loss = -jnp.mean(jnp.take_along_axis(log, y[:, None], 1))
    return loss, jnp.mean(jnp.argmax(scores, -1) == y)


@pytest.mark.parametrize(
    ("classes", "dtype"), [(MIN_LENGTH, "float32"), (100, "float16"), (100, "float64")]
)
def test_a_step_with_an_accuracy_keeps_every_bit(classes: int, dtype: str) -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        (loss, hits), grads = jax.value_and_grad(loss_and_hits, has_aux=True)(w, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), loss, hits

    rng = np.random.default_rng(0)
    sizes = {"in": (8, 16), "out": (16, classes), "bias": (classes,)}
    with jax.enable_x64(dtype == "float64"):
        w = {name: cases.normal(rng, size, dtype) for name, size in sizes.items()}
        x, y = cases.normal(rng, (48, 8), dtype), jnp.asarray(rng.integers(0, classes, 48))
        check_equal(step, w, x, y)


@FINDS
def test_it_goes_on_inside_vmap_scan_while_and_shard_map(find: Any) -> None:
    def first(x: Any) -> Any:
        return find(x, x.ndim - 1, jnp.int32)

    def scanned(x: Any) -> Any:
        return lax.scan(lambda c, row: (c + first(row), first(row)), 0, x)

    def looped(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, first(x) + c[1]), (0, 0))

    mesh, spec = jax.sharding.Mesh(jax.devices()[:2], ("data",)), jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(first, mesh=mesh, in_specs=spec, out_specs=spec)
    x = cases.normal(np.random.default_rng(0), (4, 50))
    x = x.at[1, 20].set(jnp.nan)
    for fn, arg in ((jax.vmap(first), x), (scanned, x), (looped, x[1]), (mapped, x)):
        check_equal(fn, arg)


@FINDS
def test_short_axes_integers_and_nothing_are_left(find: Any) -> None:
    def taken(*shape: int, dtype: Any = jnp.float32) -> bool:
        def fn(x: Any) -> Any:
            return find(x, len(shape) - 1, jnp.int32)

        return cases.takes(RULES[find], fn, jax.ShapeDtypeStruct(shape, dtype)) == [True]

    assert taken(MIN_LENGTH)
    assert taken(2, MAX_LENGTH, dtype=jnp.bfloat16)
    assert not taken(2, MIN_LENGTH - 1)
    assert not taken(1)
    assert not taken(0, 100)
    assert not taken(1, MAX_LENGTH + 1)
    assert not taken(100, dtype=jnp.int32)
    assert not taken(100, dtype=jnp.bool_)
