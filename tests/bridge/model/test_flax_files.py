"""Models with flax layers are saved and loaded, or say why not."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import flax.linen as nn
import keras
import numpy as np
import pytest
from flax import nnx

from bridge.model._from_flax import FlaxLayer
from tests.bridge.flax_cases import Net, NnxNet, X, make_dense, make_nnx, model_of


@pytest.mark.parametrize("make", [make_dense, make_nnx])
def test_a_saved_model_comes_back(make: Any, tmp_path: Any) -> None:
    model = model_of(make)
    model.set_weights([weight + 1 for weight in model.get_weights()])
    model.save(tmp_path / "model.keras")
    back = keras.models.load_model(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    for other in (back, clone):
        for a, b in zip(model.weights, other.weights, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=a.path)
        np.testing.assert_array_equal(model.predict(X, verbose=0), other.predict(X, verbose=0))


def test_an_unbuilt_layer_comes_back_unbuilt() -> None:
    config = keras.layers.serialize(bridge.from_flax(make_dense))
    back = keras.layers.deserialize(config)
    assert not back.built
    assert back(X).shape == (len(X), 2)


def test_weights_alone_are_saved_and_loaded_whatever_the_module(tmp_path: Any) -> None:
    model, other = model_of(make_nnx()), model_of(NnxNet(nnx.Rngs(9)))
    model.save_weights(tmp_path / "x.weights.h5")
    other.load_weights(tmp_path / "x.weights.h5")
    np.testing.assert_array_equal(model.predict(X, verbose=0), other.predict(X, verbose=0))


def test_a_module_without_a_registered_function_cannot_be_written() -> None:
    for module in (Net(), lambda: nn.Dense(2)):
        with pytest.raises(ValueError, match=r"cannot be written.*register.*save_weights"):
            model_of(module).get_config()
    config = bridge.from_flax(make_dense, name="a").get_config()
    with pytest.raises(ValueError, match=r"registered with Keras, got 'os\.system'"):
        FlaxLayer.from_config({**config, "module": "os.system"})
