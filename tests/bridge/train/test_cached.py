"""What is compiled for a model goes when the model does, or is compiled anew."""

import bridge  # isort: skip  # before keras: it chooses the backend

import gc
import weakref
from typing import Any

import keras
import pytest

from tests.bridge.fitting import X, Y, fit, fresh


def run(model: keras.Model, kind: str) -> Any:
    if kind == "fit":
        return fit(model, epochs=1)
    if kind == "evaluate":
        return bridge.evaluate(model, X, Y, verbose=0)
    return bridge.predict(model, X, verbose=0)


@pytest.mark.parametrize("kind", ["fit", "evaluate", "predict"])
def test_the_optimizer_of_before_a_second_compile_is_free_to_go(kind: str) -> None:
    model = fresh()
    model.optimizer.build(model.trainable_variables)
    run(model, kind)
    before = [weakref.ref(x) for x in (model.optimizer, model.optimizer.variables[-1])]
    model.compile("sgd", "mse")
    gc.collect()
    assert [ref() for ref in before] == [None, None]


def test_a_model_is_free_to_go() -> None:
    model = fresh()
    fit(model, epochs=1)
    before = weakref.ref(model)
    del model
    gc.collect()
    assert before() is None


def test_a_step_is_traced_once_for_each_shape_until_the_model_is_compiled_again() -> None:
    traced = []

    class Counting(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            traced.append(data[0].shape)
            return super().train_step(state, data)

    model = Counting([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    for _ in range(3):
        bridge.fit(model, X[:100], Y[:100], batch_size=8, epochs=3, verbose=0, fuse=5)
    assert sorted(traced) == [(4, 8), (8, 8)]
    model.compile("sgd", "mae")
    fit(model)
    assert len(traced) > 2
