"""Models of mixed precision whose products are not in the dtype that was asked for."""

import linecache
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import functrain as ft


class Language(nnx.Module):
    def __init__(self, rngs, dtype=None):
        options = {} if dtype is None else {"dtype": dtype}
        self.embed = nnx.Embed(11, 8, rngs=rngs, **options)
        self.head = nnx.Linear(8, 11, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))  # widens


class Scanned(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (4, 4))
        start = jnp.zeros((len(x), 4), self.dtype or jnp.float32)

        def step(h, x):
            return (h + x.astype(h.dtype)) @ kernel.astype(h.dtype), ()  # widens

        return jax.lax.scan(step, start, jnp.moveaxis(x, 1, 0))[0]


TOKENS = np.ones((2, 5), np.int32)
MODELS = {
    "nnx.Embed": (lambda dtype: ft.from_nnx(lambda rngs: Language(rngs, dtype)), TOKENS),
    "scan": (lambda dtype: ft.from_linen(Scanned(dtype)), np.ones((2, 3, 4), np.int8)),
}


def apply(model, x):
    params, model_state = model.init(jax.random.key(0), x)
    return jax.jit(lambda p: model.apply(p, model_state, x).outputs)(params)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_layer_that_widens_is_named_once(name, dtype) -> None:
    make, x = MODELS[name]
    model = ft.cast(make(None), dtype)
    with pytest.warns(UserWarning, match=f"expected products in {dtype.__name__}, got") as caught:
        apply(model, x)
    apply(model, x)
    path, line = re.search(r"float32 begins in .*?(/\S+):(\d+)\.", str(caught[0].message)).groups()
    assert path == __file__
    assert "# widens" in linecache.getline(path, int(line))
    outputs = apply(ft.cast(make(dtype), dtype), x)  # a warning would be an error
    assert outputs.dtype == jnp.float32


def test_a_model_without_products_or_with_some_that_are_narrow_is_no_warning() -> None:
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, dtype=jnp.float32)(nn.Dense(3)(x))

    apply(ft.cast(ft.from_linen(Both())), np.ones((2, 3), np.float32))
    apply(ft.cast(ft.from_linen(nn.LayerNorm())), np.ones((2, 3), np.float32))


def test_a_model_that_cannot_be_traced_raises_its_own_error_alone() -> None:
    class Broken(nn.Module):
        @nn.compact
        def __call__(self, x):
            raise RuntimeError("mine")

    model = ft.cast(ft.Model(lambda key, x: ({}, {}), ft.from_linen(Broken()).apply))
    with pytest.raises(RuntimeError, match="mine"):
        jax.jit(lambda x: model.apply({}, {}, x).outputs)(np.ones(3, np.float32))
