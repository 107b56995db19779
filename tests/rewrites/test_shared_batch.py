"""Products of one batch with many members: a product for each, and what is left."""

import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import functrain as ft
from functrain.inspect import explain_rewrites
from functrain.rewrites import optimize
from functrain.rewrites.shared_batch import MIN_SIDE, shared_batch

from . import cases

ANY_SIDE = mock.patch.object(
    importlib.import_module("functrain.rewrites.shared_batch"), "MIN_SIDE", 1
)
MEMBERS, ROWS, INPUTS, OUTPUTS = 3, 8, 12, 32


def layers(
    rows: int = ROWS, inputs: int = INPUTS, outputs: int = OUTPUTS, dtype: Any = jnp.float32
) -> Any:
    """Returns the layer of all members with its gradient, a batch, weights and cotangents."""
    rng = np.random.default_rng(0)
    shapes = (rows, inputs), (MEMBERS, inputs, outputs), (MEMBERS, rows, outputs)
    x, w, g = (cases.normal(rng, shape, dtype) for shape in shapes)

    def both(x: Any, w: Any, g: Any) -> Any:
        out, pull = jax.vjp(lambda w: x @ w, w)
        return out, *pull(g)

    return jax.vmap(both, (None, 0, 0)), x, w, g


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_is_as_accurate_as_it_was(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        fn, *args = layers(dtype=dtype)
        cases.check_accuracy(fn, args, shared_batch)
        assert cases.takes(shared_batch, fn, *args) == [True, True]


@st.composite
def products(draw: st.DrawFn) -> Any:
    """A matrix and three axes, in either order, with any axis of the matrix summed over."""
    rows, inputs = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    outputs = draw(st.integers(4 * rows, 4 * rows + 5))
    axis, is_first = draw(st.integers(0, 1)), draw(st.booleans())
    shared = (rows, inputs) if axis else (inputs, rows)
    shapes, over = [shared, (draw(st.integers(1, 4)), inputs, outputs)], [(axis,), (1,)]
    if not is_first:
        shapes, over = shapes[::-1], over[::-1]
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    args = [cases.normal(rng, shape) for shape in shapes]
    return lambda a, b: lax.dot_general(a, b, (tuple(over), ((), ()))), args


@cases.drawn(6)
@given(case=products())
def test_any_such_product_is_what_it_was(case: Any) -> None:
    fn, args = case
    with ANY_SIDE:
        cases.check_accuracy(lambda *args: [fn(*args)], args, shared_batch)


def test_the_weights_stay_as_they_are() -> None:
    fn, x, w, g = layers()
    after = cases.rewritten(fn, (x, w, g), shared_batch)
    dots = [eqn for eqn in after.eqns if eqn.primitive.name == "dot_general"]
    assert [dot.invars[1].aval.shape for dot in dots] == [w.shape, g.shape]
    assert [dot.invars[0].aval.shape[1:] for dot in dots] == [x.shape, x.T.shape]


def test_each_operand_keeps_its_precision() -> None:
    mixed = (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
    x, w = jnp.ones((ROWS, INPUTS)), jnp.ones((MEMBERS, INPUTS, OUTPUTS))
    for args, over, expected in (
        ((x, w), ((1,), (1,)), mixed),
        ((w, x), ((1,), (1,)), mixed[::-1]),  # they are exchanged
    ):
        dot = lambda a, b, over=over: lax.dot_general(a, b, (over, ((), ())), precision=mixed)  # noqa: E731
        after = cases.rewritten(dot, args, shared_batch)
        (eqn,) = [eqn for eqn in after.eqns if eqn.primitive.name == "dot_general"]
        assert eqn.params["precision"] == expected


def test_nan_and_inf_pass_through_alike() -> None:
    fn, x, w, g = layers()
    x = x.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf)
    for got, want in zip(jax.jit(optimize(fn))(x, w, g), jax.jit(fn)(x, w, g), strict=True):
        odd = ~np.isfinite(want)
        np.testing.assert_array_equal(~np.isfinite(got), odd)
        np.testing.assert_array_equal(np.asarray(got)[odd], np.asarray(want)[odd])


def test_the_sizes_and_types_decide() -> None:
    def taken(*sizes: int, dtype: Any = jnp.float32) -> bool:
        fn, *args = layers(*sizes, dtype=dtype)
        found = cases.takes(shared_batch, fn, *args)
        assert len(set(found)) == 1  # layer and gradient alike
        return found[0]

    assert taken(32, 784, 128)
    assert taken(32, MIN_SIDE, 32)
    assert not taken(32, 784, 64)
    assert not taken(128, 784, 128)
    assert not taken(MIN_SIDE - 1, 784, 128)
    assert not taken(32, MIN_SIDE - 1, 128)
    assert not taken(32, 784, 128, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "equation", ["nbd,ndh->nbh", "bd,dnh->bnh", "bd,ndhk->bnhk", "bd,nhd->bnh"]
)
def test_other_products_are_left(equation: str) -> None:
    sizes = {"n": MEMBERS, "b": ROWS, "d": INPUTS, "h": 64, "k": 2}
    of_x, of_w = equation.split("->")[0].split(",")
    x, w = (jnp.ones([sizes[axis] for axis in axes]) for axes in (of_x, of_w))
    assert not any(cases.takes(shared_batch, lambda x, w: jnp.einsum(equation, x, w), x, w))


def test_only_auto_takes_it() -> None:
    fn, *args = layers()
    assert [row.rule for row in explain_rewrites(fn, *args).rows] == ["shared_batch"] * 2
    assert not any(row.rule for row in explain_rewrites(fn, *args, rewrites="exact").rows)


def test_it_goes_on_inside_shard_map() -> None:
    mesh, spec = jax.sharding.Mesh(jax.devices()[:2], ("data",)), jax.sharding.PartitionSpec("data")
    _, x, w, _ = layers(2 * ROWS)
    fn = jax.shard_map(
        lambda x, w: jnp.einsum("bd,ndh->bnh", x, w),
        mesh=mesh,
        in_specs=(spec, jax.sharding.PartitionSpec()),
        out_specs=spec,
    )
    got = jax.jit(optimize(fn))(x, w)  # a warning would be an error
    np.testing.assert_allclose(got, jax.jit(fn)(x, w), rtol=1e-5, atol=1e-5)


def test_a_scan_of_steps_does_not_depend_on_its_length() -> None:
    _, x, w, _ = layers()
    cases.check_chunks(lambda x, w: jnp.einsum("bd,ndh->nbh", x, w), x / 4, w)


def test_members_of_a_population_train_as_they_would_alone() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, INPUTS)).astype(np.float32)
    y = rng.integers(2, size=64).astype(np.int32)

    def init(key: Any, x: Any) -> Any:
        a, b = jax.random.split(key)
        normal = jax.random.normal
        return {"a": normal(a, (INPUTS, OUTPUTS)) / 4, "b": normal(b, (OUTPUTS, 2)) / 6}, {}

    def apply(params: Any, state: Any, x: Any, *, rng: Any = None, training: bool = False) -> Any:
        return ft.ModelOutput(jnp.tanh(x @ params["a"]) @ params["b"], state)

    tx = optax.sgd(0.1, momentum=0.9)
    model = ft.Model(init, apply)
    loss = optax.softmax_cross_entropy_with_integer_labels
    step = ft.train_step(ft.supervised(model, loss), tx)
    keys = jax.random.split(jax.random.key(0), MEMBERS)
    states = [
        ft.TrainState.create(params=model.init(key, x)[0], tx=tx, model_state={}) for key in keys
    ]
    together, of_all = ft.population.stack(states), ft.population.step(step)
    rules = [row.rule for row in explain_rewrites(of_all, together, (x[:ROWS], y[:ROWS])).rows]
    assert rules.count("shared_batch") == 2
    data = ft.ArrayLoader((x, y), ROWS)
    results = [ft.fit(together, of_all, data, epochs=2, fuse=k, verbose=0).state for k in (3, 8)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)
    for i, state in enumerate(states):
        alone = ft.fit(state, step, data, epochs=2, verbose=0).state
        for a, b in zip(*map(jax.tree.leaves, (results[0][i], alone)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
