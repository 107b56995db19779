"""The guard around whatever is traced: it refuses side effects on Keras, and has none itself."""

import bridge  # isort: skip  # before keras: it chooses the backend

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

import functrain as ft
from bridge.model._scope import no_side_effects
from tests.bridge.pure import snapshot

X, Y = np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)


class LateLayer(keras.Model):
    """Has a layer that is first met in training."""

    def __init__(self) -> None:
        super().__init__()
        self.early = layers.Dense(3)
        # Two reads of weights that were never given a value differ: it draws anew each time.
        self.late = layers.Dense(3, kernel_initializer=draw)

    def build(self, input_shape: Any) -> None:
        self.early.build(input_shape)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.early(x)
        return self.late(x) if training else x


DRAWS = itertools.count(1.0)


def draw(shape: Any, dtype: Any) -> jax.Array:
    return jnp.full(shape, next(DRAWS), dtype)


def train(model: keras.Model) -> ft.TrainState:
    tx = optax.sgd(0.1)
    loss_fn = ft.supervised(bridge.from_keras(model), bridge.loss("mse"))
    stacked = jax.tree.map(lambda x: np.stack([x] * 3), (X, Y))
    state, _ = ft.fuse(ft.train_step(loss_fn, tx), 3)(bridge.create_state(model, tx), stacked)
    return state


def guarded(function: Any, *args: Any) -> Any:
    def inside(*args: Any) -> Any:
        with no_side_effects():
            return function(*args)

    with jax.checking_leaks():
        return jax.jit(inside)(*args)


@pytest.mark.parametrize("calls_it_once", [True, False], ids=["called once", "as it is"])
def test_after_a_refused_step_the_model_trains_and_keras_builds_other_models(
    calls_it_once: bool,
) -> None:
    model = LateLayer()
    model(X)
    with pytest.raises(ValueError, match=r"(?s)no new variables.*late/kernel.*create_state"):
        train(model)
    late = model.late.kernel
    np.testing.assert_array_equal(late, late)
    if calls_it_once:
        model(X, training=True)
    state = train(model)
    bridge.to_keras(state, model)
    np.testing.assert_array_equal(late, state.params["late"]["kernel"])

    other = keras.Sequential([keras.Input((3,)), layers.Dense(3)])
    other.compile("sgd", "mse")
    other.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(late, state.params["late"]["kernel"])


def test_a_layer_that_is_built_under_the_guard_has_weights() -> None:
    layer = layers.Dense(2, kernel_initializer=draw)
    counter = keras.Variable(0.0, name="counter")
    with pytest.raises(ValueError, match="counter"):  # the assignment, not the weights
        guarded(lambda x: counter.assign(jnp.sum(layer(x))), X)
    np.testing.assert_array_equal(layer.kernel, layer.kernel)


def test_the_guard_may_be_entered_under_itself() -> None:
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization()])
    before = snapshot(model)

    def outer(x: jax.Array) -> jax.Array:
        with pytest.raises(ValueError, match="moving_mean"), no_side_effects():
            model(x, training=True)
        return model(x)  # reads only: the outer guard has nothing to refuse

    with pytest.warns(UserWarning, match="(?s)compiled in as constants.*moving_mean"):
        np.testing.assert_array_equal(guarded(outer, X), model(X))
    np.testing.assert_array_equal(jax.tree.leaves(before), jax.tree.leaves(snapshot(model)))


def annealed(variable: keras.Variable) -> Any:
    return lambda y, outputs: variable * keras.ops.mean((y - outputs) ** 2, -1)


def train_by_functrain(model: keras.Model, loss: Any) -> None:
    tx = optax.sgd(0.1)
    loss_fn = ft.supervised(bridge.from_keras(model), bridge.loss(loss))
    ft.fit(bridge.create_state(model, tx), ft.train_step(loss_fn, tx), [(X, Y)], verbose=0)


def test_a_variable_that_nobody_tracks_is_told_as_a_constant() -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dropout(0.1, seed=1), layers.Dense(3)])
    weight = keras.Variable(2.0, name="annealed")
    with pytest.warns(UserWarning, match=r"(?s)compiled in as constants:.*annealed: float32\[\]"):
        train_by_functrain(model, annealed(weight))


def test_a_variable_that_the_model_tracks_is_not() -> None:
    class Scaled(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = self.add_weight(trainable=False, initializer="ones")

        def call(self, x: Any) -> Any:
            return x * self.scale

    model = keras.Sequential([keras.Input((3,)), Scaled(), layers.BatchNormalization()])
    train_by_functrain(model, "mse")
