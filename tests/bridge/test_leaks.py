"""Nothing of the bridge keeps a tracer: all of it passes `jax.checking_leaks()`."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import keras
import numpy as np
import optax
import pytest
from keras import layers

import functrain as ft

X, Y = np.ones((4, 2), np.float32), np.ones((4, 1), np.int32)
STACKED = jax.tree.map(lambda x: np.stack([x] * 3), (X, Y))
SCORES, ONE_HOT = np.full((4, 3), 0.5, np.float32), np.eye(4, 3, dtype=np.float32)
PARAMS = {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)}


class Measured(layers.Layer):
    """Updates a metric in its `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.metrics.Mean()

    def call(self, x: Any) -> Any:
        self.mean.update_state(x)
        return x


def net(*more: Any) -> keras.Model:
    hidden = layers.Dense(3, kernel_regularizer="l2", kernel_constraint="non_neg")
    rest = [layers.BatchNormalization(), layers.Dropout(0.5), layers.Softmax()]
    return keras.Sequential([keras.Input((2,)), *more, hidden, *rest])


def compiled(optimizer: Any) -> keras.Model:
    model = net()
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def measures(make: Callable[[], Any], y: Any = ONE_HOT, outputs: Any = SCORES) -> None:
    metric = make()
    state = jax.jit(metric.update)(metric.init(), (None, y), ft.Aux(outputs=outputs), None)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.jit(metric.compute)(state)))


def calls() -> None:
    model = bridge.from_keras(net(Measured()))
    params, model_state = model.init(jax.random.key(0), X)

    def loss(params: Any) -> Any:
        out = model.apply(params, model_state, X, rng=jax.random.key(1), training=True)
        return out.outputs.sum() + sum(out.losses)

    jax.jit(jax.grad(loss))(params)


def optimizes(optimizer: Any) -> None:
    tx = bridge.optimizer(optimizer)
    state = jax.jit(tx.init)(PARAMS)
    jax.jit(tx.update)(PARAMS, state, PARAMS)


def trains_in_functrain() -> None:
    model = net()
    tx = bridge.optimizer(keras.optimizers.Adam(), model=model)
    loss_fn = ft.supervised(bridge.from_keras(model), bridge.loss("crossentropy"))
    step = ft.train_step(loss_fn, tx, metrics={"accuracy": bridge.metric("accuracy")})
    ft.fuse(step, 3)(step.start(bridge.create_state(model, tx)), STACKED)


def takes_steps(optimizer: Any) -> None:
    model = compiled(optimizer)
    state = bridge.keras_state(model, (X, Y))
    jax.jit(bridge.test_step(model))(state, (X, Y))
    ft.fuse(bridge.train_step(model), 3)(state, STACKED)


def fits() -> None:
    model = compiled("adam")
    bridge.fit(model, X, Y, batch_size=2, validation_data=(X, Y), verbose=0)
    bridge.predict(model, X, verbose=0)


def calls_flax() -> None:
    model = bridge.from_keras(net(bridge.from_flax(nn.Dense(3))))
    params, model_state = model.init(jax.random.key(0), X)
    jax.jit(model.apply)(params, model_state, X)


COSINE = keras.optimizers.schedules.CosineDecay(0.1, 10)
F1 = keras.metrics.F1Score
PROGRAMS: dict[str, Callable[[], None]] = {
    "accuracy of classes": lambda: measures(lambda: bridge.metric("accuracy"), Y),
    "built metric": lambda: measures(lambda: bridge.metric(F1(), example=(SCORES, ONE_HOT))),
    "from_keras with a key": calls,
    "SGD of a schedule": lambda: optimizes(keras.optimizers.SGD(COSINE)),
    "steps of functrain": trains_in_functrain,
    "steps with optax": lambda: takes_steps(bridge.OptaxOptimizer(optax.adam, learning_rate=0.1)),
    "fit": fits,
    "flax in Keras": calls_flax,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_no_tracer_is_kept(program: Callable[[], None]) -> None:
    with jax.checking_leaks():
        program()
