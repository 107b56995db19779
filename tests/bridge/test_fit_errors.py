"""What bridge.fit, evaluate and predict refuse, and that the model is as it was."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

X, Y = np.ones((32, 4), np.float32), np.ones((32, 4), np.float32)


def compiled() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_model_that_is_not_compiled(method: str) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
    with pytest.raises(ValueError, match="compile"):
        getattr(bridge, method)(model, X, Y)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_something_else_than_a_model(method: str) -> None:
    with pytest.raises(TypeError, match=r"model: expected a keras\.Model, got Dense"):
        getattr(bridge, method)(layers.Dense(1), X)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_unknown_arguments(method: str) -> None:
    with pytest.raises(TypeError, match="workers"):
        getattr(bridge, method)(compiled(), X, workers=3)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("fuse", [0, -1, "all", 2.5])
def test_a_fuse_that_is_no_number_of_steps(method: str, fuse: Any) -> None:
    with pytest.raises(ValueError, match="fuse: expected 'auto' or a whole number"):
        getattr(bridge, method)(compiled(), X, fuse=fuse)


def test_unknown_rewrites() -> None:
    with pytest.raises(ValueError, match="rewrites: expected 'auto', 'exact' or 'off'"):
        bridge.fit(compiled(), X, Y, rewrites="fast")


def test_weights_of_two_kinds() -> None:
    with pytest.raises(ValueError, match="`class_weight` and `sample_weight`"):
        bridge.fit(compiled(), X, Y, class_weight={0: 1.0}, sample_weight=np.ones(32))


def test_arrays_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="cardinality"):
        bridge.fit(compiled(), X, Y[:16])


@pytest.mark.parametrize("arguments", [(np.ones((32, 3)), Y), (X, np.ones((32, 3)))])
def test_wrong_shapes_leave_the_model_whole(arguments: Any) -> None:
    model = compiled()
    model.fit(X, Y, verbose=0)
    before = [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]
    with pytest.raises(Exception, match=r"incompatible|shape|dimension"):
        bridge.fit(model, *arguments, verbose=0)
    after = [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    bridge.fit(model, X, Y, verbose=0)
