"""Layers with a state, a loss, a mask or a dtype of their own."""

from collections.abc import Callable
from typing import Any

import keras
from keras import layers, optimizers, regularizers

from tests.bridge import parity
from tests.bridge.parity import IMAGES, SEQUENCES, TOKENS, AddsLoss, Case, X, Y, dense

CASES = parity.Cases()


def changed(change: Callable[[Any], None], *more: Any) -> Case:
    """Returns a dense model that was changed before it was compiled."""
    model, arguments = dense(*more)
    change(model)
    model.compile("adam", "mse")
    return model, arguments


def freeze(model: Any) -> None:
    model.layers[0].trainable = model.layers[1].trainable = False


def freeze_all(model: Any) -> None:
    model.trainable = False


def quantized(mode: str | None = None, rank: int | None = None) -> Case:
    def change(model: Any) -> None:
        for layer in model.layers:
            if mode is not None:
                layer.quantize(mode)
            if rank is not None:
                layer.enable_lora(rank)

    return changed(change, layers.Dense(8))


def net(x: Any, y: Any, *inner: Any, optimizer: Any = "adam", policy: Any = None) -> Case:
    model = keras.Sequential([keras.Input(x.shape[1:]), *inner, layers.Dense(4, dtype=policy)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model, {"x": x, "y": y}


def mixed(policy: str, optimizer: Any) -> Case:
    hidden = layers.Dense(8, "relu", dtype=policy)
    return net(X, Y, hidden, optimizer=optimizer, policy=policy)


CASES.table(
    every_run="batch_norm mixed_bfloat16",
    batch_norm=lambda: dense(layers.BatchNormalization(), validation_split=0.25),
    dropout=lambda: dense(layers.Dropout(0.5), layers.GaussianNoise(0.1)),
    frozen=lambda: changed(freeze, layers.BatchNormalization()),
    wholly_frozen=lambda: changed(freeze_all, layers.BatchNormalization(), layers.Dropout(0.5)),
    constraints=lambda: dense(
        layers.Dense(8, kernel_constraint="max_norm", bias_constraint="non_neg")
    ),
    regularizers=lambda: dense(
        layers.Dense(8, kernel_regularizer="l2", bias_regularizer=regularizers.L1(0.1)),
        layers.Dense(8, activity_regularizer="l2"),
        layers.ActivityRegularization(0.01),
    ),
    add_loss=lambda: dense(AddsLoss(), layers.Dense(8), AddsLoss()),
    spectral_normalization=lambda: dense(layers.SpectralNormalization(layers.Dense(8))),
    convolutions=lambda: net(
        IMAGES,
        Y,
        layers.RandomFlip(),
        layers.Conv2D(8, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.MaxPooling2D(),
        layers.Flatten(),
    ),
    bidirectional_gru=lambda: net(SEQUENCES, Y, layers.Bidirectional(layers.GRU(8, dropout=0.2))),
    mixed_bfloat16=lambda: mixed("mixed_bfloat16", "adam"),
    mixed_float16=lambda: mixed(
        "mixed_float16", optimizers.LossScaleOptimizer(optimizers.SGD(0.1))
    ),
    lora=lambda: quantized(rank=2),
    float8=lambda: quantized("float8"),
    int4_with_lora=lambda: quantized("int4", 2),
    int8_with_lora=lambda: quantized("int8", 2),
)


@CASES
def shared_layers_in_nested_models() -> Case:
    shared = layers.Dense(8, "relu", activity_regularizer="l2")
    inner = keras.Sequential([keras.Input((8,)), shared, layers.BatchNormalization()])
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(4)(inner(shared(inner(inputs)))))
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": X, "y": Y}


@CASES
def masks() -> Case:
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(inputs)
    x = layers.LSTM(8, return_sequences=True)(x)
    model = keras.Model(inputs, layers.TimeDistributed(layers.Dense(4))(x))
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": TOKENS, "y": SEQUENCES}


@CASES.each
def test_fit_equals_keras_to_the_bit_whatever_is_fused(make: Any, fuse: Any) -> None:
    parity.assert_fits_as_keras(make, fuse)
