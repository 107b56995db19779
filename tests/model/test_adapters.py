"""The adapters of lora: products without their sums, and bases in int8 and half precision."""

import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import functrain as ft

from ..conftest import digest
from .test_combinators import X, create
from .test_lora import KEY, by_hand


def test_int8_is_within_half_a_step_of_each_output() -> None:
    kernel = np.random.default_rng(0).normal(size=(16, 4, 8)) * 10.0 ** np.arange(8)
    kernel = kernel.astype(np.float32)
    kernel[:, 1, 2] = 0
    _, model_state = ft.lora(by_hand(kernel), "**", rank=2, base_dtype="int8").init(KEY, X)
    stored = model_state.frozen["kernel"]
    assert stored.values.dtype == jnp.int8
    steps = np.abs(kernel).max(0, keepdims=True) / 127
    assert stored.scale.shape == steps.shape
    np.testing.assert_allclose(stored.scale[steps > 0], steps[steps > 0], rtol=1e-6)
    error = np.abs(stored.values * np.float64(stored.scale) - kernel)
    assert (error <= steps / 2 * 1.00001).all()
    # Keras rounds in the same way.
    theirs, _ = keras.quantizers.abs_max_quantize(kernel, axis=0)
    np.testing.assert_array_equal(theirs[:, steps[0] > 0], stored.values[:, steps[0] > 0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_int8_of_half_precision_is_within_half_a_step(dtype) -> None:
    kernel = np.random.default_rng(0).normal(size=(64, 8)) * 10.0 ** np.arange(-7, 1)
    kernel = jnp.asarray(kernel, dtype)
    _, model_state = ft.lora(by_hand(kernel), "**", rank=2, base_dtype="int8").init(KEY, X)
    stored = model_state.frozen["kernel"]
    assert stored.scale.dtype == dtype
    scale = np.float64(stored.scale)
    error = np.abs(stored.values * scale - np.float64(kernel))
    assert (error <= scale / 2 * 1.00001).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_base_of_half_precision_keeps_its_dtype_and_adapters_are_float32(dtype) -> None:
    kernel = jax.random.normal(KEY, (6, 3)).astype(dtype)
    for base_dtype in (None, "int8"):
        model = ft.lora(by_hand(kernel), "**", rank=2, base_dtype=base_dtype)
        state = create(model)
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
        assert state.model_state.lora_scale.dtype == jnp.float32
        assert ft.merge_frozen(state).params["kernel"].dtype == dtype
        assert model.apply(state.params, state.model_state, X.astype(dtype)).outputs.dtype == dtype
    assert digest(ft.merge_frozen(create(ft.lora(by_hand(kernel), "**", rank=2))).params) == digest(
        {"kernel": kernel}
    )


USES = {  # of a matrix [6, 6]
    "product": lambda w, x: x @ w,
    "on the left": lambda w, x: jnp.einsum("io,bi->ob", w, x),
    "over its outputs": lambda w, x: jnp.einsum("io,bo->bi", w, x),
    "on the left, over its outputs": lambda w, x: jnp.einsum("io,bo->ib", w, x),
    "twice": lambda w, x: x @ w @ w,
    "transposed": lambda w, x: x @ w.T,
    "in a jitted function": lambda w, x: jax.jit(lambda w, x: jnp.tanh(x @ w))(w, x),
    "in half precision": lambda w, x: x.astype("bfloat16") @ w.astype("bfloat16"),
    "rows": lambda w, x: w[jnp.arange(3)] + x[:3],
    "in a loop": lambda w, x: jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=2)[0],
    "in a checkpoint": lambda w, x: jax.checkpoint(lambda w, x: jnp.sin(x @ w))(w, x),
    "with itself": lambda w, x: w @ w,
    "returned": lambda w, x: w,
    "in a batch": lambda w, x: jnp.einsum("io,io->i", w, w + x[:6]),
}


@pytest.mark.parametrize("use", USES)
def test_factored_products_are_those_of_the_sum(use) -> None:
    kernel = jax.random.normal(KEY, (6, 6))

    def apply(params, model_state, x, *, rng=None, training=False):
        return ft.ModelOutput(USES[use](params["kernel"], x), model_state)

    def value_and_grad(factored):
        model = ft.lora(by_hand(kernel)._replace(apply=apply), "**", rank=2, factored=factored)
        _, model_state = model.init(KEY, X)
        a, b = jax.random.normal(KEY, (2, 6, 2))

        def loss(params):
            outputs = model.apply(params, model_state, X).outputs.astype("float32")
            return (outputs**2).mean(), outputs

        return jax.jit(jax.value_and_grad(loss, has_aux=True))({"kernel": {"a": a, "b": b.T}})

    tolerance = {"rtol": 0.05, "atol": 0.5} if "half" in use else {"rtol": 1e-4, "atol": 1e-4}
    for got, expected in zip(
        *map(jax.tree.leaves, map(value_and_grad, (True, False))), strict=True
    ):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, **tolerance)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="in")(x)[:, None] + jnp.arange(4.0)[:, None]
        x = nn.MultiHeadDotProductAttention(2, name="attention")(x, x)
        return nn.Dense(3, name="head")(jnp.tanh(x).mean(1))


def test_attention_is_factored_and_computes_no_gradient_of_a_matrix() -> None:
    def grads_and_shapes(factored):
        model = ft.lora(ft.from_linen(Attention()), "**/kernel", rank=1, factored=factored)
        state = create(model)
        params = jax.tree.map(lambda x: x + 0.1, state.params)

        def loss(params):
            return (model.apply(params, state.model_state, X, training=True).outputs ** 2).mean()

        grad = jax.jit(jax.grad(loss))
        products = re.findall(r"f32\[([\d,]*)\] = dot_general", str(jax.make_jaxpr(grad)(params)))
        kernels = [x.shape for x in jax.tree.leaves(state.model_state.frozen) if x.ndim > 1]
        return grad(params), set(products) & {",".join(map(str, shape)) for shape in kernels}

    grads, of_kernels = grads_and_shapes(True)
    expected, of_merged_kernels = grads_and_shapes(False)
    assert not of_kernels
    assert of_merged_kernels
    chex.assert_trees_all_close(grads, expected, rtol=1e-3, atol=1e-6)


def test_a_factored_model_has_dropout_statistics_and_losses() -> None:
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            self.sow("losses", "penalty", (x**2).mean())
            x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(8, name="body")(x))
            return nn.BatchNorm(use_running_average=not train)(x)

    outputs = []
    for factored in (True, False):
        model = ft.lora(ft.from_linen(Noisy()), "**/kernel", rank=2, factored=factored)
        params, model_state = model.init(KEY, X)
        inputs = jnp.asarray(X)  # NumPy would square them otherwise, and round in its own way
        outputs.append(model.apply(params, model_state, inputs, rng=KEY, training=True))
    assert len(outputs[0].losses) == 1
    assert digest(outputs[0]) == digest(outputs[1])
