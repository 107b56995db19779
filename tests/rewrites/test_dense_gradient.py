"""Gradients of dense layers: the wide product, and what is left."""

import importlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from functrain.inspect import explain_rewrites
from functrain.rewrites import optimize
from functrain.rewrites._equations import walk_equations
from functrain.rewrites.dense_gradient import MAX_NARROW_SIDE, MIN_ROWS, dense_gradient

from . import cases

ANY_SIZE = mock.patch.multiple(
    importlib.import_module("functrain.rewrites.dense_gradient"), MIN_ROWS=0, MIN_PRODUCTS=0
)
# Axes of rows, of inputs, of outputs.
LAYERS = {
    "wide": ((4, 5), (3,), (7,)),
    "high": ((4, 5), (7,), (3,)),
    "square": ((4, 5), (6,), (6,)),
    "one axis of rows": ((20,), (7,), (3,)),
    "heads out of features": ((4, 5), (6,), (2, 4)),
    "features out of heads": ((2, 3, 4), (2, 4), (6,)),
}


def layer(rows: Any, inputs: Any, outputs: Any, dtype: Any = jnp.float32) -> Any:
    """Returns `(x, w) -> x @ w`, with operands and a cotangent."""
    rng = np.random.default_rng(0)
    x, w, g = (
        cases.normal(rng, shape, dtype)
        for shape in ((*rows, *inputs), (*inputs, *outputs), (*rows, *outputs))
    )
    over = tuple(range(len(rows), x.ndim)), tuple(range(len(inputs)))
    return lambda x, w: lax.dot_general(x, w, (over, ((), ()))), x, w, g


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_is_as_accurate_as_it_was(name: str, dtype: str) -> None:
    with ANY_SIZE, jax.enable_x64(dtype == "float64"):
        dense, *args = layer(*LAYERS[name], dtype)
        cases.check_accuracy(cases.all_three(dense), args, dense_gradient)
        assert cases.takes(dense_gradient, cases.all_three(dense), *args) == [False, True, False]


@pytest.mark.parametrize("name", LAYERS)
def test_the_product_has_fewer_rows_than_columns(name: str) -> None:
    dense, *args = layer(*LAYERS[name])
    with ANY_SIZE:
        after = cases.rewritten(cases.all_three(dense), args, dense_gradient)
    (barrier,) = [
        e for e, *_ in walk_equations(after) if e.primitive.name == "optimization_barrier"
    ]
    rows, columns = barrier.outvars[0].aval.shape
    assert rows <= columns


def test_each_operand_keeps_its_precision() -> None:
    x, g = jnp.ones((8, 4, 3)), jnp.ones((8, 4, 2))
    mixed = (lax.Precision.DEFAULT, lax.Precision.HIGHEST)

    def fn(x: Any, g: Any) -> Any:
        return lax.dot_general(x, g, (((0, 1), (0, 1)), ((), ())), precision=mixed)

    with ANY_SIZE:
        after = cases.rewritten(fn, (x, g), dense_gradient)
    (dot,) = [eqn for eqn in after.eqns if eqn.primitive.name == "dot_general"]
    assert dot.params["precision"] == mixed[::-1]  # they were exchanged: x has more columns


def test_nan_and_inf_pass_through_alike() -> None:
    dense, x, w, g = layer((4, 5), (7,), (3,))
    x = x.at[0, 0, 0].set(jnp.nan).at[1, 0, 1].set(jnp.inf)
    fn = cases.all_three(dense)
    with ANY_SIZE:
        got = jax.jit(optimize(fn))(x, w, g)[2]
    want = jax.jit(fn)(x, w, g)[2]
    odd = ~np.isfinite(want)
    np.testing.assert_array_equal(~np.isfinite(got), odd)
    np.testing.assert_array_equal(np.asarray(got)[odd], np.asarray(want)[odd])


def test_the_sizes_and_types_decide() -> None:
    def taken(rows: Any, inputs: int, outputs: int, dtype: Any = jnp.float32) -> bool:
        dense, *args = layer(rows, (inputs,), (outputs,), dtype)
        return cases.takes(dense_gradient, cases.all_three(dense), *args) == [False, True, False]

    assert taken((16, 64), 64, 64)
    assert taken((4096,), 128, MAX_NARROW_SIDE)
    assert not taken((4096,), 128, MAX_NARROW_SIDE + 1)  # both wide, and rows in one axis
    assert not taken((4096,), 128, 1)
    assert not taken((2, MIN_ROWS // 2 - 1), 64, 64)
    assert not taken((16, 64), 4, 4)
    assert not taken((16, 64), 64, 64, jnp.bfloat16)


def test_only_auto_takes_it() -> None:
    dense, *args = layer((16, 64), (32,), (32,))
    for mode, rules in (("auto", ["dense_gradient"]), ("exact", [])):
        rows = explain_rewrites(cases.all_three(dense), *args, rewrites=mode).rows
        assert [row.rule for row in rows] == rules


def test_it_goes_on_inside_shard_map() -> None:
    mesh, spec = jax.sharding.Mesh(jax.devices()[:2], ("data",)), jax.sharding.PartitionSpec("data")
    dense, x, w, g = layer((4, 5), (7,), (3,))

    def gradient(x: Any, g: Any) -> Any:
        return jax.linear_transpose(lambda w: dense(x, w), w)(g)[0][None]

    fn = jax.shard_map(gradient, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    with ANY_SIZE:
        got = jax.jit(optimize(fn))(x, g)  # a warning would be an error
    np.testing.assert_allclose(got, jax.jit(fn)(x, g), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["wide", "high"])
def test_a_scan_of_steps_does_not_depend_on_its_length(name: str) -> None:
    dense, x, w, _ = layer(*LAYERS[name])
    with ANY_SIZE:
        cases.check_chunks(dense, x / 4, w)
