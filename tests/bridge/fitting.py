"""What the tests of callbacks, files and interrupts around bridge.fit share."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import keras
import numpy as np
from keras import layers

RNG = np.random.default_rng(0)
X = RNG.normal(size=(104, 8)).astype(np.float32)
Y = RNG.normal(size=(104, 4)).astype(np.float32)


def fresh(**compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu"), layers.Dense(4)])
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **compiled})
    return model


def values(model: keras.Model) -> list[Any]:
    return [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]


def assert_same(a: keras.Model, b: keras.Model) -> None:
    for one, other in zip(values(a), values(b), strict=True):
        np.testing.assert_array_equal(one, other)


def fit(model: keras.Model, way: Any = bridge.fit, **kwargs: Any) -> Any:
    if way is bridge.fit:
        kwargs.setdefault("rewrites", "exact")
    defaults = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    return way(model, X, Y, **{**defaults, **kwargs})


class Sizes(keras.callbacks.Callback):
    """Counts the optimizer's steps at the end of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(int(self.model.optimizer.iterations.value))
