"""Layers with a state, a loss, a mask or a dtype of their own."""

from typing import Any

import keras
from keras import layers, optimizers, regularizers

from tests.bridge import parity
from tests.bridge.parity import IMAGES, SEQUENCES, TOKENS, AddsLoss, Case, X, Y, dense

CASES = parity.Cases()


@CASES.every_run
def batch_norm() -> Case:
    return dense(layers.BatchNormalization(), validation_split=0.25)


@CASES
def dropout() -> Case:
    return dense(layers.Dropout(0.5), layers.GaussianNoise(0.1))


@CASES
def frozen() -> Case:
    model, arguments = dense(layers.BatchNormalization())
    model.layers[0].trainable = model.layers[1].trainable = False
    model.compile("adam", "mse")
    return model, arguments


@CASES
def wholly_frozen() -> Case:
    model, arguments = dense(layers.BatchNormalization(), layers.Dropout(0.5))
    model.trainable = False
    model.compile("adam", "mse")
    return model, arguments


@CASES
def constraints() -> Case:
    return dense(layers.Dense(8, kernel_constraint="max_norm", bias_constraint="non_neg"))


@CASES
def kernel_regularizers() -> Case:
    return dense(layers.Dense(8, kernel_regularizer="l2", bias_regularizer=regularizers.L1(0.1)))


@CASES
def activity_regularizer() -> Case:
    return dense(layers.Dense(8, activity_regularizer="l2"), layers.ActivityRegularization(0.01))


@CASES
def add_loss() -> Case:
    return dense(AddsLoss(), layers.Dense(8), AddsLoss())


@CASES
def spectral_normalization() -> Case:
    return dense(layers.SpectralNormalization(layers.Dense(8)))


@CASES
def shared_layers_in_nested_models() -> Case:
    shared = layers.Dense(8, "relu", activity_regularizer="l2")
    inner = keras.Sequential([keras.Input((8,)), shared, layers.BatchNormalization()])
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(4)(inner(shared(inner(inputs)))))
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": X, "y": Y}


@CASES
def convolutions() -> Case:
    model = keras.Sequential(
        [
            keras.Input((6, 6, 4)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    model.compile("adam", "mse")
    return model, {"x": IMAGES, "y": Y}


@CASES
def random_augmentation() -> Case:
    net = [keras.Input((6, 6, 4)), layers.RandomFlip(), layers.Flatten(), layers.Dense(4)]
    model = keras.Sequential(net)
    model.compile("adam", "mse")
    return model, {"x": IMAGES, "y": Y}


@CASES
def masks() -> Case:
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(inputs)
    x = layers.LSTM(8, return_sequences=True)(x)
    model = keras.Model(inputs, layers.TimeDistributed(layers.Dense(4))(x))
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": TOKENS, "y": SEQUENCES}


@CASES
def bidirectional_gru() -> Case:
    model = keras.Sequential(
        [
            keras.Input((6, 4)),
            layers.Bidirectional(layers.GRU(8, dropout=0.2)),
            layers.Dense(4),
        ]
    )
    model.compile("adam", "mse")
    return model, {"x": SEQUENCES, "y": Y}


@CASES
def attention() -> Case:
    inputs = keras.Input((6, 4))
    x = layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs)
    x = layers.LayerNormalization()(x + inputs)
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    model.compile("adamw", "mse")
    return model, {"x": SEQUENCES, "y": Y}


@CASES.every_run
def mixed_bfloat16() -> Case:
    policy = "mixed_bfloat16"
    net = [keras.Input((8,)), layers.Dense(8, "relu", dtype=policy), layers.Dense(4, dtype=policy)]
    model = keras.Sequential(net)
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": X, "y": Y}


@CASES
def mixed_float16() -> Case:
    policy = "mixed_float16"
    net = [keras.Input((8,)), layers.Dense(8, "relu", dtype=policy), layers.Dense(4, dtype=policy)]
    model = keras.Sequential(net)
    model.compile(optimizers.LossScaleOptimizer(optimizers.SGD(0.1)), "mse")
    return model, {"x": X, "y": Y}


@CASES
def lora() -> Case:
    model, arguments = dense(layers.Dense(8))
    for layer in model.layers:
        layer.enable_lora(2)
    model.compile("adam", "mse")
    return model, arguments


@CASES
def float8() -> Case:
    model, arguments = dense(layers.Dense(8))
    for layer in model.layers:
        layer.quantize("float8")
    model.compile("adam", "mse")
    return model, arguments


@CASES
def int4_with_lora() -> Case:
    model, arguments = dense(layers.Dense(8))
    for layer in model.layers:
        layer.quantize("int4")
        layer.enable_lora(2)
    model.compile("adam", "mse")
    return model, arguments


@CASES
def int8_with_lora() -> Case:
    model, arguments = dense(layers.Dense(8))
    for layer in model.layers:
        layer.quantize("int8")
        layer.enable_lora(2)
    model.compile("adam", "mse")
    return model, arguments


@CASES.each
def test_fit_equals_keras_to_the_bit_whatever_is_fused(make: Any, fuse: Any) -> None:
    parity.assert_fits_as_keras(make, fuse)
