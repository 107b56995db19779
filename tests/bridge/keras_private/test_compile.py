"""What bridge writes down of Keras's compile (checked with Keras 3.15.1)."""

import bridge  # isort: skip  # before keras: it chooses the backend

import inspect

import keras
import pytest
from keras import layers

from bridge import keras_private

del bridge


def test_compile_is_written_down_and_otherwise_as_it_was():
    def rotating():
        return keras.Sequential([layers.RandomRotation(0.1), layers.Dense(1)])

    model = rotating()
    assert keras_private.compile.jit_compile_asked(model) is None
    model.compile("sgd", "mse")
    assert (model.jit_compile, keras_private.compile.jit_compile_asked(model)) == (False, "auto")
    model.compile("sgd", "mse", jit_compile=False)
    assert (model.jit_compile, keras_private.compile.jit_compile_asked(model)) == (False, False)
    model.compile("sgd", "mse", None, None, None, False, 1, "auto")
    assert keras_private.compile.jit_compile_asked(model) == "auto"
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        model.compile(nothing=1)
    assert "jit_compile" in inspect.signature(model.compile).parameters
    assert keras.Model.compile.__doc__.startswith("Configures the model for training")
