"""Fused steps over data sharded on a mesh with explicit axes, as `jax.make_mesh` makes it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import functrain as ft

from ..conftest import digest

TX = optax.adam(1e-2)


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("data",), (AxisType.Explicit,))


def dense(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x.reshape(x.shape[0], -1) @ params["dense"])


def pooled(params: Any, x: jax.Array) -> jax.Array:
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return dense({"dense": params["dense"][:12]}, x)


def convolved(params: Any, x: jax.Array) -> jax.Array:
    kernel = params["dense"][:27].reshape(3, 3, 3, 2)
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ).mean((1, 2))


def smaller_than_its_kernels(params: Any, x: jax.Array) -> jax.Array:
    """Convolves images of 2 x 2, as a product of patches."""
    numbers = ("NHWC", "HWIO", "NHWC")
    kernel = jnp.tile(params["dense"][:27].reshape(3, 3, 3, 2), 4)
    out = lax.conv_general_dilated(x[:, :2, :2], kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return out[..., :2].mean((1, 2))


def step_of(model: Any) -> Any:
    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        out = model(params, batch[0])
        return jnp.mean(jnp.square(out - batch[1])), out

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        (loss, out), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, "out": out}

    return step


def setup(mesh: Any, k: int) -> tuple[Any, Any]:
    """A state on every device, and K batches, each of them shared out."""
    rng = np.random.default_rng(0)
    params = {"dense": rng.normal(size=(48, 2)).astype(np.float32)}
    chunk = (
        rng.normal(size=(k, 8, 4, 4, 3)).astype(np.float32),
        rng.normal(size=(k, 8, 2)).astype(np.float32),
    )
    state = jax.device_put((params, TX.init(params)), NamedSharding(mesh, P()))
    return state, jax.device_put(chunk, NamedSharding(mesh, P(None, "data")))


@pytest.mark.parametrize("rewrites", ["auto", "off"])
@pytest.mark.parametrize("model", [dense, pooled, convolved, smaller_than_its_kernels])
@pytest.mark.parametrize(("k", "steps"), [(1, 1), (3, 3), (3, 2)])
def test_a_fused_step_is_the_jitted_step(
    k: int, steps: int, model: Any, rewrites: Any, mesh: Any
) -> None:
    state, chunk = setup(mesh, k)
    step = step_of(model)
    want, plain = state, jax.jit(step)
    for i in range(steps):
        want, logs = plain(want, jax.tree.map(lambda x, i=i: x[i], chunk))
    got, rows = ft.fuse(step, k, donate=False, rewrites=rewrites)(state, chunk, steps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-6), got, want)
    np.testing.assert_allclose(rows["out"][steps - 1], logs["out"], 1e-6, 1e-6)
    assert rows["out"].sharding.spec == P(None, "data", None)
    assert {x.sharding.spec for x in jax.tree.leaves(got[0])} == {P(None, None)}


def test_results_do_not_depend_on_k(mesh: Any) -> None:
    state, chunk = setup(mesh, 3)
    step = step_of(dense)
    together, _ = ft.fuse(step, 3, donate=False)(state, chunk)
    for i in range(3):
        state, _ = ft.fuse(step, 1)(state, jax.tree.map(lambda x, i=i: x[i : i + 1], chunk))
    assert digest(state) == digest(together)
