"""Flax modules of each kind, and models with one as a layer."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import keras
import numpy as np
from flax import nnx
from keras import layers

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6)).astype(np.float32)
Y = RNG.normal(size=(40, 2)).astype(np.float32)


class Net(nn.Module):
    """Parameters, statistics, dropout, a loss of its own."""

    width: int = 8
    act: Callable[[Any], Any] = nn.relu
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = self.act(nn.Dense(self.width, dtype=self.dtype)(x))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        self.sow("losses", "size", 0.01 * jnp.mean(x**2))
        return nn.Dropout(0.3, deterministic=not train)(x)


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Conv(3, (3,))(x[..., None]).mean(-1)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.drop(self.norm(x))


@keras.saving.register_keras_serializable("tests")
def make_nnx() -> NnxNet:
    return NnxNet(nnx.Rngs(3))


@keras.saving.register_keras_serializable("tests")
def make_dense() -> nn.Module:
    return nn.Dense(2)


MAKE: dict[str, Callable[[], Any]] = {
    "linen": Net,
    "linen without switches": Convolutional,
    "nnx": make_nnx,
}


def model_of(module: Any, **kwargs: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    layer = bridge.from_flax(module, name="flax", **kwargs)
    return keras.Sequential([keras.Input((6,)), layers.Dense(6), layer, layers.Dense(2)])


def require_same(a: keras.Model, b: keras.Model) -> None:
    for x, y in zip(a.variables, b.variables, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=x.path)
