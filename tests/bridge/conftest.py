"""One model of every kind, built anew at each call: `build() -> (model, inputs)`."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

del bridge

Built = tuple[keras.Model, Any]
BUILDERS: dict[str, Callable[[], Built]] = {}


def kind(function: Callable[[], Built]) -> Callable[[], Built]:
    BUILDERS[function.__name__] = function
    return function


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "build" in metafunc.fixturenames:
        metafunc.parametrize("build", BUILDERS.values(), ids=BUILDERS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    # The names of unnamed layers begin anew, as in a new process.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


@pytest.fixture
def builders() -> dict[str, Callable[[], Built]]:
    return BUILDERS


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def stack(*net: Any, shape: tuple[int, ...] = (3,)) -> Built:
    return keras.Sequential([keras.Input(shape), *net]), floats(5, *shape)


@kind
def sequential() -> Built:
    return stack(layers.Dense(4, "relu"), layers.Dense(4, "relu"), layers.Dense(2))


@kind
def functional() -> Built:
    x = keras.Input((3,))
    y = layers.Dense(3)(x)
    return keras.Model(x, layers.Dense(2)(layers.Add()([x, y]))), floats(5, 3)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = layers.Dense(4)
        self.blocks = [layers.Dense(4), layers.Dense(4)]
        self.heads = {"a": layers.Dense(2), "b": layers.Dense(2)}
        self._hidden = layers.Dense(2)
        self.drop = layers.Dropout(0.5)

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(shape=())

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.fc1(x)
        for block in self.blocks:
            x = block(x)
        x = self.drop(x)  # `training` is not passed on: Keras does that itself
        return self.scale * (self.heads["a"](x) + self.heads["b"](x) + self._hidden(x))


@kind
def subclassed() -> Built:
    model = Subclassed()
    model(floats(5, 3))
    return model, floats(5, 3)


@kind
def dicts_of_inputs_and_outputs() -> Built:
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    x = layers.Concatenate()([a, b])
    outputs = {"y": layers.Dense(2)(x), "z": layers.Dense(1)(x)}
    return keras.Model({"a": a, "b": b}, outputs), {"a": floats(5, 3), "b": floats(5, 2)}


@kind
def nested() -> Built:
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.BatchNormalization()])
    x = keras.Input((3,))
    middle = keras.Model(x, layers.Dense(3)(inner(x)), name="middle")
    return keras.Sequential([keras.Input((3,)), middle, inner, layers.Dense(1)]), floats(5, 3)


@kind
def shared_layers() -> Built:
    shared = layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l1")
    x = keras.Input((3,))
    return keras.Model(x, layers.Dense(2)(shared(shared(x)))), floats(5, 3)


@kind
def batch_norm() -> Built:
    net = [layers.Conv2D(3, 3), layers.BatchNormalization(), layers.GlobalAveragePooling2D()]
    return stack(*net, layers.Dense(2), shape=(4, 4, 2))


@kind
def dropout() -> Built:
    dropouts = layers.Dropout(0.5, seed=1), layers.Dropout(0.5)
    return stack(layers.Dense(8), dropouts[0], layers.Dense(8), dropouts[1])


@kind
def frozen() -> Built:
    model, x = batch_norm()
    model.layers[0].trainable = False
    model.layers[1].trainable = False
    return model, x


class Twins(layers.Layer):
    """Everything called the same: two layers, a variable, a seed generator."""

    def __init__(self) -> None:
        super().__init__()
        self._a = layers.Dense(3, name="x")
        self._b = layers.Dense(3, name="x")
        self._c = keras.random.SeedGenerator(1, name="x")

    def build(self, input_shape: Any) -> None:
        self._v = self.add_weight(shape=(3,), name="x")
        self._a.build(input_shape)
        self._b.build(input_shape)

    def call(self, x: Any) -> Any:
        return self._a(x) + self._b(x) + self._v * keras.random.normal((3,), seed=self._c)


@kind
def same_names() -> Built:
    return stack(Twins(), Twins())


@kind
def masked_lstm() -> Built:
    x = keras.Input((6,), dtype="int32")
    y = layers.LSTM(4, return_sequences=True)(layers.Embedding(7, 3, mask_zero=True)(x))
    tokens = np.random.default_rng(0).integers(0, 7, size=(5, 6)).astype(np.int32)
    tokens[:, 4:] = 0
    return keras.Model(x, layers.TimeDistributed(layers.Dense(2))(y)), tokens


@kind
def recurrent() -> Built:
    x = keras.Input((6, 3))
    y = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    y = layers.Bidirectional(layers.GRU(3, return_sequences=True, dropout=0.3))(y)
    y = layers.RNN([layers.GRUCell(3), layers.LSTMCell(2)])(y)
    return keras.Model(x, y), floats(5, 6, 3)


@kind
def mixed_bfloat16() -> Built:
    policy = "mixed_bfloat16"
    return stack(
        layers.Conv2D(3, 3, dtype=policy, kernel_regularizer="l2"),
        layers.BatchNormalization(dtype=policy),
        layers.Flatten(dtype=policy),
        layers.Dense(2, dtype=policy, activity_regularizer="l2"),
        shape=(4, 4, 2),
    )


class Counting(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        self.seen.update_state(x)
        self.add_loss(keras.ops.mean(x))
        return x


@kind
def metric_and_loss_in_call() -> Built:
    net = [keras.Input((3,)), Counting(), layers.Dense(3), Counting()]
    return keras.Sequential([keras.Sequential(net), layers.Dense(2)]), floats(5, 3)


@kind
def bare_layer() -> Built:
    layer = layers.Dense(2, dtype="mixed_bfloat16", activity_regularizer="l2")
    layer.build((None, 3))
    return layer, floats(5, 3)
