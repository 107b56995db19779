"""Models with flax layers are saved and loaded, or say why not."""

import bridge  # isort: skip  # before keras: it chooses the backend

import subprocess
import sys
import textwrap
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx
from keras import layers

import functrain as ft
from bridge.model._from_flax import FlaxLayer
from tests.bridge.flax_cases import Net, NnxNet, X, Y, make_nnx, model_of

CONFIGURED = {
    "fields": lambda: Net(width=3, act=nn.gelu, dtype=jnp.bfloat16),
    "defaults": Net,
    "submodules": lambda: nn.Sequential([nn.Dense(4, kernel_init=nn.initializers.zeros), nn.relu]),
    "of flax itself": lambda: nn.Dense(3, precision=jax.lax.Precision.HIGHEST, name="out"),
    "a function": lambda: make_nnx,
    "a Keras model": lambda: bridge.to_linen(
        keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    ),
}


QUICK = ("a function", "a Keras model")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in CONFIGURED]
)
def test_a_saved_model_comes_back(name: str, tmp_path: Any) -> None:
    model = model_of(CONFIGURED[name]())
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    back = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(model.weights, back.weights, strict=True):  # Keras saves no seed counters
        np.testing.assert_array_equal(a, b, err_msg=a.path)
    np.testing.assert_array_equal(model.predict(X, verbose=0), back.predict(X, verbose=0))
    assert type(back.layers[1].module) is type(model.layers[1].module)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(model.predict(X, verbose=0), clone.predict(X, verbose=0))


def test_an_unbuilt_layer_comes_back_unbuilt() -> None:
    config = keras.layers.serialize(bridge.from_flax(nn.Dense(2)))
    back = keras.layers.deserialize(config)
    assert not back.built
    assert back(X).shape == (len(X), 2)


def test_weights_alone_are_saved_and_loaded_whatever_the_module(tmp_path: Any) -> None:
    model, other = model_of(make_nnx()), model_of(NnxNet(nnx.Rngs(9)))
    model.save_weights(tmp_path / "x.weights.h5")
    other.load_weights(tmp_path / "x.weights.h5")
    np.testing.assert_array_equal(model.predict(X, verbose=0), other.predict(X, verbose=0))


def test_a_saved_model_comes_back_in_a_fresh_process_without_tensorflow(tmp_path: Any) -> None:
    model = model_of(nn.Sequential([nn.Dense(4), nn.tanh, nn.BatchNorm(use_running_average=True)]))
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", X)
    code = """
        import sys
        sys.modules["tensorflow"] = None  # importing it is an error
        import bridge, keras, numpy as np
        model = keras.models.load_model("model.keras")
        np.save("y.npy", model.predict(np.load("x.npy"), verbose=0))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env={**__import__("os").environ, "PYTHONPATH": str(ft.__path__[0]) + "/.."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), model.predict(X, verbose=0))


def test_what_cannot_be_written_down_says_what_to_do() -> None:
    for module in (
        make_nnx(),
        Net(act=lambda x: x),
        nn.Dense(2, kernel_init=nn.initializers.he_normal()),
    ):
        with pytest.raises(
            ValueError, match=r"cannot be written to a file[^$]*register_keras[^$]*save_weights"
        ):
            model_of(module).get_config()
    config = bridge.from_flax(Net(), name="a").get_config()
    config["module"]["module"] = "my_package.nets:Missing"
    with pytest.raises(ValueError, match=r"class Missing of my_package.nets, found none. Import"):
        FlaxLayer.from_config(config)
    config["module"] = {"function": "os.system"}
    with pytest.raises(ValueError, match=r"a public function of .*jax\.nn.*got 'os\.system'"):
        FlaxLayer.from_config(config)
    config["module"] = {"module": "subprocess:Popen", "fields": {}}
    with pytest.raises(ValueError, match="found none"):
        FlaxLayer.from_config(config)
