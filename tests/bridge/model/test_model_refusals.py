"""What from_keras and to_keras refuse, in words; and the Keras model stays whole."""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import bridge
import functrain
from tests.bridge.pure import SGD, assert_close, call, start


class Explodes(keras.Model):
    """Has a layer that is first met in training; fails there, or not."""

    def __init__(self, error=None):
        super().__init__()
        self.fc = layers.Dense(3)
        self.late = layers.Dense(3)
        self.error = error

    def build(self, input_shape):
        self.fc.build(input_shape)

    def call(self, x, training=None):
        x = self.fc(x)
        if training:
            x = self.late(x)
            if self.error is not None:
                raise self.error
        return x


def whole(model, x):
    """Two calls agree, and every variable has a value outside of any trace."""
    assert not any(isinstance(v.value, jax.core.Tracer) for v in model.variables)
    return np.array_equal(call(model, x, True), call(model, x, True))


def test_an_exception_in_the_middle_of_a_trace_leaves_the_model_whole():
    model, x = Explodes(RuntimeError("stop")), np.ones((2, 3), np.float32)
    model(x)
    apply, params, model_state = start(model)
    with pytest.raises(RuntimeError, match="stop"):
        jax.jit(jax.grad(lambda p: apply(p, model_state, x, training=True).outputs.sum()))(params)
    model.error = None
    assert whole(model, x)
    apply, params, model_state = start(model)
    assert_close(apply(params, model_state, x, training=True).outputs, model(x, training=True))


def test_losses_left_behind_by_a_failed_fit_do_not_return(builders):
    model, x = builders["shared_layers"]()
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="incompatible shapes"):
        model.fit(x, np.ones((5, 9), np.float32), verbose=0)
    apply, params, model_state = start(model)
    losses = jax.jit(apply)(params, model_state, x).losses
    assert len(losses) == 3
    assert all(np.isfinite(losses))


def test_updates_of_untracked_variables_are_named():
    model = keras.Sequential([layers.Input(batch_shape=(2, 4, 3)), layers.LSTM(2, stateful=True)])
    apply, params, model_state = start(model)
    with pytest.raises(ValueError, match=r"(?s)lstm.*float32\[2, 2\].*stateful=False"):
        jax.jit(apply)(params, model_state, np.ones((2, 4, 3), np.float32))


def test_an_unbuilt_model_is_refused_with_the_remedy():
    built = Explodes()
    built.built = True  # it only says so
    for model in (keras.Sequential([layers.Dense(2)]), Explodes(), built):
        for use in (bridge.from_keras, lambda m: bridge.create_state(m, SGD)):
            with pytest.raises(ValueError, match=r"expected a built model.*model\(x\)"):
                use(model)


def test_what_is_no_keras_model_is_refused():
    for use in (bridge.from_keras, lambda m: bridge.create_state(m, SGD)):
        with pytest.raises(TypeError, match=r"got Model\. .*TrainState\.create"):
            use(functrain.freeze(functrain.Model(init=None, apply=None), "bias"))
        with pytest.raises(TypeError, match=r"expected a keras.Model or keras.Layer, got int"):
            use(3)


def test_arguments_of_to_keras_in_the_wrong_order_are_refused(builders):
    model, _ = builders["sequential"]()
    state = bridge.create_state(model, SGD)
    with pytest.raises(TypeError, match=r"model: expected a keras.Model.*got TrainState"):
        bridge.to_keras(model, state)
    with pytest.raises(TypeError, match=r"with \.params and \.model_state, got .*\(state, model\)"):
        bridge.to_keras({}, model)


def test_a_layer_frozen_after_init_is_named_by_apply(builders):
    model, x = builders["batch_norm"]()
    apply, params, model_state = start(model)
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match=r"(?s)model_state/conv2d/kernel: missing.*frozen"):
        jax.jit(apply)(params, model_state, x)


def test_a_cast_around_a_keras_model_names_keras_own_way():
    net = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model = functrain.cast(bridge.from_keras(net))
    with pytest.raises(ValueError, match=r"(?s)kernel: expected float32.*set_dtype_policy"):
        model.apply(*model.init(jax.random.key(0), None), np.ones((1, 3), np.float32))
