"""No program leaves anything behind in a Keras model, whichever door it came through."""

import bridge  # isort: skip  # before keras: it chooses the backend

import pathlib
import types
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

import functrain as ft

X = np.ones((8, 3), np.float32)


def normalized() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dense(2)])


def calls(model: keras.Model) -> Any:
    """A step that calls the model as it is, which assigns its statistics."""
    return lambda state, x: (state, model(x, training=True))


def measures(model: keras.Model) -> ft.MeteredStep:
    def loss_fn(params: Any, model_state: Any, x: Any, **how: Any) -> Any:
        return jnp.mean(model(x, training=True)), ft.Aux(model_state)

    return ft.eval_step(loss_fn)


DOORS = {
    "predict": lambda model: ft.predict(0.0, calls(model), ft.ArrayLoader(X, 4)),
    "evaluate": lambda model: ft.evaluate(
        ft.TrainState.create(params={}, tx=optax.sgd(1.0)), measures(model), ft.ArrayLoader(X, 4)
    ),
    "fit": lambda model: ft.fit(jnp.zeros(()), calls(model), ft.ArrayLoader(X, 4), verbose=0),
    "uncompiled": lambda model: ft.fit(
        jnp.zeros(()), calls(model), ft.ArrayLoader(X, 4), jit=False, verbose=0
    ),
    "fuse": lambda model: ft.fuse(calls(model), 2)(jnp.zeros(()), X.reshape(2, 4, 3)),
}


def test_the_import_of_bridge_changes_no_method_of_keras() -> None:
    classes = {x for x in (*vars(keras).values(), *vars(layers).values()) if isinstance(x, type)}
    methods = {
        f"{parent.__name__}.{name}": method
        for cls in (*classes, keras.Model)
        for parent in cls.__mro__
        if parent.__module__.startswith("keras.")
        for name, method in vars(parent).items()
        if isinstance(method, types.FunctionType)
    }
    assert "Trainer.compile" in methods
    folder = str(pathlib.Path(bridge.__file__).parent)
    ours = [name for name, x in methods.items() if x.__code__.co_filename.startswith(folder)]
    assert not ours


@pytest.mark.parametrize("door", DOORS)
def test_a_step_that_assigns_variables_is_refused_and_leaves_no_tracer(door) -> None:
    model = normalized()
    before = [np.array(v) for v in model.variables]
    with pytest.raises(ValueError, match="expected a pure function, got one that assigns Keras"):
        DOORS[door](model)
    assert not any(isinstance(v.value, jax.core.Tracer) for v in model.variables)
    for x, v in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(x, np.array(v))


def test_a_layer_first_called_in_training_is_refused_in_words() -> None:
    class Late(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.late = layers.Dense(2), layers.Dense(2)

        def build(self, shape: Any) -> None:
            self.first.build(shape)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.late(self.first(x)) if training else self.first(x)

    model = Late()
    model(X)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"made .*kernel.*: a layer is called for the first time"):
        bridge.fit(model, X, X[:, :2], verbose=0)
    model(X, training=True)
    model.compile("sgd", "mse")
    bridge.fit(model, X, X[:, :2], verbose=0)
    assert len(model.trainable_variables) == 4
