"""Nothing of the bridge keeps a tracer: all of it passes `jax.checking_leaks()`."""

import bridge  # isort: skip  # before keras: it chooses the backend

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
SCORES = np.full((4, 3), 0.5, np.float32)
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
    return keras.Sequential(
        [
            keras.Input((2,)),
            *more,
            layers.Dense(3, kernel_regularizer="l2", kernel_constraint="non_neg"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Softmax(),
        ]
    )


def compiled(optimizer: Any) -> keras.Model:
    model = net()
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    ("y", "outputs"),
    [(Y, SCORES), (np.eye(4, 3), SCORES), (Y, SCORES[:, :1])],
    ids=["sparse", "one-hot", "binary"],
)
def test_the_metric_that_is_chosen_by_shapes(y: Any, outputs: Any) -> None:
    metric = bridge.metric("accuracy")
    state = metric.init()
    with jax.checking_leaks():
        for _ in range(2):  # the second time it meets the metric that it chose at the first
            state = jax.jit(metric.update)(state, (None, y), ft.Aux(outputs=outputs), None)
        assert np.isfinite(jax.jit(metric.compute)(state))


@pytest.mark.parametrize(
    "metric",
    [
        lambda: bridge.metric(keras.metrics.AUC()),
        lambda: bridge.metric("mae"),
        lambda: bridge.metric(keras.metrics.F1Score(), example=(SCORES, np.eye(4, 3))),
    ],
    ids=["AUC", "by name", "built by its first batch"],
)
def test_metrics(metric: Any) -> None:
    with jax.checking_leaks():
        metric = metric()
        state = metric.init()
        y = np.eye(4, 3, dtype=np.float32)
        state = jax.jit(metric.update)(state, (None, y), ft.Aux(outputs=SCORES), None)
        jax.jit(metric.compute)(state)


@pytest.mark.parametrize(
    "loss", ["sparse_categorical_crossentropy", "crossentropy", keras.losses.Huber()]
)
def test_losses(loss: Any) -> None:
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda outputs: bridge.loss(loss)(outputs, Y).sum()))(SCORES)


@pytest.mark.parametrize("seeded", [True, False], ids=["with a key", "by Keras's seeds"])
def test_from_keras(seeded: bool) -> None:
    model = bridge.from_keras(net(Measured()))
    params, model_state = model.init(jax.random.key(0), X)
    rng = jax.random.key(0) if seeded else None

    def loss(params: Any) -> Any:
        out = model.apply(params, model_state, X, rng=rng, training=True)
        return out.outputs.sum() + sum(out.losses)

    with jax.checking_leaks():
        jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize(
    "make",
    [
        keras.optimizers.Adam,
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)),
    ],
    ids=["Adam", "SGD of a schedule"],
)
def test_optimizers(make: Any) -> None:
    tx = bridge.optimizer(make())
    with jax.checking_leaks():
        state = jax.jit(tx.init)(PARAMS)
        jax.jit(tx.update)(PARAMS, state, PARAMS)


def test_a_state_and_the_steps_of_functrain_over_it() -> None:
    model = net()
    tx = bridge.optimizer(keras.optimizers.Adam(), model=model)
    loss_fn = ft.supervised(bridge.from_keras(model), bridge.loss("crossentropy"))
    step = ft.train_step(loss_fn, tx, metrics={"accuracy": bridge.metric("accuracy")})
    with jax.checking_leaks():
        state = step.start(bridge.create_state(model, tx))
        ft.fuse(step, 3)(state, STACKED)


@pytest.mark.parametrize(
    "optimizer",
    [keras.optimizers.Adam, lambda: bridge.OptaxOptimizer(optax.adam, learning_rate=1e-3)],
    ids=["Keras's", "optax's"],
)
def test_steps_of_keras(optimizer: Any) -> None:
    model = compiled(optimizer())
    state = bridge.keras_state(model, (X, Y))
    with jax.checking_leaks():
        jax.jit(bridge.test_step(model))(state, (X, Y))
        ft.fuse(bridge.train_step(model), 3)(state, STACKED)


def test_fit_evaluate_and_predict() -> None:
    model = compiled("adam")
    with jax.checking_leaks():
        bridge.fit(model, X, Y, batch_size=2, validation_data=(X, Y), verbose=0)
        bridge.predict(model, X, verbose=0)


def test_constraints_and_schedules() -> None:
    model = net()
    tx = optax.chain(
        optax.sgd(bridge.schedule(keras.optimizers.schedules.CosineDecay(0.1, 10))),
        bridge.constraints(model),
    )
    state = bridge.create_state(model, tx)
    with jax.checking_leaks():
        jax.jit(tx.update)(state.params, state.opt_state, state.params)


def test_flax_in_keras() -> None:
    model = bridge.from_keras(net(bridge.from_flax(nn.Dense(3))))
    params, model_state = model.init(jax.random.key(0), X)
    with jax.checking_leaks():
        jax.jit(model.apply)(params, model_state, X)


def test_keras_in_flax() -> None:
    module = bridge.to_linen(net())
    with jax.checking_leaks():
        jax.jit(module.apply)(jax.jit(module.init)(jax.random.key(0), X), X)
