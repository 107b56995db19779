"""Loops whose scalars are rows of one array, as programs for GPUs have them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import functrain as ft
from functrain.common._platform import compiling_for
from functrain.engine._loop import repeat
from tests.workload_parts import parts

K = 4


def run(body: Any, carry: Any, stacked: Any, k: int = K, *, scalar_rows: bool) -> Any:
    return jax.jit(lambda c, xs: repeat(body, c, xs, k, None, scalar_rows=scalar_rows))(
        carry, stacked
    )


def assert_same(body: Any, carry: Any, stacked: Any, k: int = K) -> None:
    """Asserts that both loops return the same types and bits."""
    expected = run(body, carry, stacked, k, scalar_rows=False)
    returned = run(body, carry, stacked, k, scalar_rows=True)
    assert jax.tree.structure(returned) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (returned, expected)), strict=True):
        assert x.aval == y.aval
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = map(jax.random.key_data, (x, y))
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def loops_of_scalars(jaxpr: Any) -> list[int]:
    """Returns how many scalars each loop of a program carries."""
    return [
        sum(var.aval.shape == () for var in eqn.params["jaxpr"].jaxpr.invars)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "scan"
    ]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.uint32, jnp.float16, jnp.bool_])
def test_a_scalar_of_any_dtype_is_carried_and_logged(dtype: Any) -> None:
    def body(carry: Any, x: Any) -> Any:
        total, count = carry
        return ((total + x).astype(dtype), count + 1), {"x": x.astype(dtype), "total": total}

    xs = jnp.asarray([0, 1, 3, 2], dtype)
    assert_same(body, (jnp.zeros((), dtype), jnp.int32(7)), xs)


def test_arrays_keys_and_weak_types_stay_as_they_are() -> None:
    def body(carry: Any, x: Any) -> Any:
        key, new = jax.random.split(carry["key"])
        kernel = carry["kernel"] + jax.random.normal(new, (3,)) * x
        weak = carry["weak"] * 2
        carry = {"key": key, "kernel": kernel, "weak": weak, "sum": carry["sum"] + kernel.sum()}
        return carry, (kernel, x, {"weak": weak})

    carry = {"key": jax.random.key(0), "kernel": jnp.ones(3), "weak": 1.5, "sum": jnp.zeros(())}
    assert_same(body, jax.tree.map(jnp.asarray, carry), jnp.arange(4.0))


def test_numbers_that_are_not_finite_keep_their_bits() -> None:
    bits = jnp.asarray([0x7FC00001, 0xFF800000, 0x80000000, 0x00000001], jnp.uint32)
    odd = lax.bitcast_convert_type(bits, jnp.float32)
    _, (carried, logged) = run(
        lambda c, x: ((x, c[1]), (c[0], x)), (odd[0], odd[2]), odd, scalar_rows=True
    )
    np.testing.assert_array_equal(carried.view(jnp.uint32), bits[jnp.array([0, 0, 1, 2])])
    np.testing.assert_array_equal(logged.view(jnp.uint32), bits)


@pytest.mark.parametrize("k", [1, 2])
def test_short_loops_and_loops_without_scalars_are_the_same(k: int) -> None:
    assert_same(lambda c, x: (c + x, (c, x.sum())), jnp.ones(2), jnp.ones((k, 2)), k)
    assert_same(lambda c, x: (c + x, {}), jnp.ones(2), jnp.ones((k, 2)), k)
    assert_same(lambda c, x: (c, x), (), jnp.ones((k, 2)), k)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_only_the_loop_for_a_gpu_carries_no_scalars(platform: str) -> None:
    state, step, batch = parts("digits-mlp")
    chunk = jax.tree.map(lambda x: jax.ShapeDtypeStruct((K, *x.shape), x.dtype), batch)
    with compiling_for(platform):
        traced = ft.fuse(step, K).program.trace(state, chunk, np.int32(K))
    (scalars,) = loops_of_scalars(traced.jaxpr.jaxpr)
    # The number of the step, by which the loop finds its row.
    assert scalars == 1 if platform == "gpu" else scalars > 3
