"""Training from scratch: a loop here and one by hand, with the same numbers."""

import bridge  # isort: skip  # before keras

import keras
import numpy as np
import optax
import pytest

import functrain as ft
from tests.guides import by_hand
from tests.guides.by_hand import (
    batches,
    digits,
    mlp,
    values,
)

BATCH = 32
CROSS_ENTROPY = keras.losses.CategoricalCrossentropy(from_logits=True)


def loss_fn_of(keras_model, loss=CROSS_ENTROPY):
    """The loss written out, with Keras's own loss in it, so that only the route differs."""
    model = bridge.from_keras(keras_model)

    def loss_fn(params, model_state, batch, *, rng, training):
        x, y = batch
        outputs, model_state, added = model.apply(
            params, model_state, x, rng=rng, training=training
        )
        value = loss(y, outputs)
        for term in added:
            value = value + term
        return value, ft.Aux(model_state, outputs)

    return loss_fn


@pytest.fixture(scope="module")
def train():
    return digits(20 * BATCH + 16, one_hot=True)  # the last batch is half a one


@pytest.fixture(scope="module")
def held_out():
    x, y = digits(3_000, one_hot=True)
    return x[2_000:], y[2_000:]


ADAM = optax.adam(1e-3)


def raw(model, train, epochs=1):
    """The guide's loop: losses of all steps, accuracies of every epoch's, and the last state."""
    loop = by_hand.Loop(model, CROSS_ENTROPY, ADAM, keras.metrics.CategoricalAccuracy())
    state, losses, running = loop.start(), [], []
    for _ in range(epochs):
        state = loop.reset(state)
        more, accuracies, state = loop.epoch(state, batches(train, BATCH))
        losses += more
        running.append(accuracies)
    return loop, losses, running, state


def metrics():
    """Keras's metric, and functrain's, which must say the same."""
    keras_metric = bridge.metric(keras.metrics.CategoricalAccuracy())
    return {"accuracy": keras_metric, "own_accuracy": ft.metrics.accuracy()}


def ours(model, train, epochs=1, **kwargs):
    step = ft.train_step(loss_fn_of(model), ADAM, metrics=metrics())
    data = by_hand.Dataset(train, BATCH)
    return ft.fit(bridge.create_state(model, ADAM), step, data, epochs=epochs, verbose=0, **kwargs)


def test_a5_the_running_metric_is_read_in_mid_epoch(train) -> None:
    _, _, (running,), _ = raw(mlp(), train)
    seen = {}

    @ft.every(steps=10)
    def log(event):
        found = event.metrics()
        assert found["accuracy"] == found["own_accuracy"]
        seen[event.step * event.examples] = float(found["accuracy"])

    ours(mlp(), train, hooks=[log])
    assert seen == {n * BATCH: running[n - 1] for n in (10, 20)}


def test_a8_an_evaluation_loop_has_metrics_of_its_own(train, held_out) -> None:
    model = mlp()
    loop, _, _, trained = raw(model, train)
    loop.write_back(trained)
    metric = values(loop.metric.variables)
    state = (*trained[:2], metric)
    losses = []
    for batch in batches(held_out, 300):  # 300, 300, 300, 100
        loss, state = loop.eval_step(state, batch)
        losses.append(float(loss))
    step = ft.eval_step(loss_fn_of(model), metrics=metrics())
    found = ft.evaluate(
        bridge.create_state(model, optax.sgd(0.1)), step, by_hand.Dataset(held_out, 300)
    )
    assert (
        found["accuracy"] == found["own_accuracy"] == float(loop.metric.stateless_result(state[2]))
    )
    assert found["loss"] == pytest.approx(np.average(losses, weights=[3, 3, 3, 1]), rel=1e-6)
