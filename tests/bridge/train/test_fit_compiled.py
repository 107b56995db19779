"""Which models bridge.fit compiles: those that Keras does, and those that JAX can all the same."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.bridge.fitting import values

X = np.random.default_rng(0).normal(size=(24, 8, 8, 1)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(24, 2)).astype(np.float32)


class Counted(keras.layers.Layer):
    """Counts how often Python comes by. It may look at values, in training."""

    def __init__(self, look: bool = False) -> None:
        super().__init__()
        self.calls, self.look = 0, look
        self.supports_jit = False

    def call(self, x: Any, training: bool = False) -> Any:
        self.calls += 1
        return x * float(np.sign(np.asarray(x)[0, 0])) if self.look and training else x


def make(
    *, look: bool = False, augment: bool = True, **compiled: Any
) -> tuple[keras.Model, Counted]:
    keras.utils.set_random_seed(0)
    counted = Counted(look)
    augmentation = [layers.RandomRotation(0.2, seed=1), layers.RandomTranslation(0.2, 0.2, seed=2)]
    net = [*augmentation * augment, layers.Flatten(), counted, layers.Dense(2)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *net])
    model.compile(optimizer="sgd", loss="mse", **compiled)
    counted.calls = 0
    return model, counted


def fit(model: keras.Model, way: Any = bridge.fit, **kwargs: Any) -> Any:
    return way(model, X, Y, batch_size=4, epochs=3, verbose=0, shuffle=False, **kwargs)


def test_augmentation_that_keras_leaves_uncompiled_is_compiled() -> None:
    model, counted = make()
    assert not model.jit_compile
    ours = fit(model)
    assert 0 < counted.calls <= 3  # traces, not the 18 steps
    theirs = fit(make()[0], keras.Model.fit)
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-5)


def test_evaluate_and_predict_compile_it_too() -> None:
    model, counted = make()
    loss = bridge.evaluate(model, X, Y, batch_size=4, verbose=0)
    outputs = bridge.predict(model, X, batch_size=4, verbose=0)
    assert counted.calls <= 4
    assert loss == pytest.approx(model.evaluate(X, Y, batch_size=4, verbose=0), rel=1e-5)
    np.testing.assert_allclose(outputs, model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("look", "kwargs", "compiled"),
    [
        (True, {}, {}),  # it looks at values: no trace
        (False, {"rewrites": "exact"}, {}),
        (False, {}, {"run_eagerly": True}),
    ],
)
def test_what_cannot_or_must_not_be_compiled_runs_as_in_keras(
    look: bool, kwargs: Any, compiled: Any
) -> None:
    (ours, counted), (theirs, _) = (make(look=look, augment=False, **compiled) for _ in range(2))
    fit(ours, **kwargs)
    assert counted.calls >= 18
    fit(theirs, keras.Model.fit)
    for one, other in zip(values(ours), values(theirs), strict=True):  # one by one, last bits vary
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
