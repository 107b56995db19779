"""Small Keras models of every kind the identities are promised for, with data that fits."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

CLASSES = 5
Build = Callable[[], tuple[keras.Model, np.ndarray]]


def mlp() -> keras.Model:
    return keras.Sequential([keras.Input((12,)), layers.Dense(16, "relu"), layers.Dense(CLASSES)])


def batch_norm() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(CLASSES, kernel_regularizer="l2"),
        ]
    )


def narrow() -> keras.Model:
    """So small that the compiler would fuse a single step otherwise than one in a loop."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, "relu"),
            layers.BatchNormalization(),
            layers.Dense(CLASSES),
        ]
    )


def dropout() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16, "relu"),
            layers.Dropout(0.3, seed=1),
            layers.GaussianNoise(0.1, seed=2),
            layers.Dense(CLASSES),
        ]
    )


def lstm() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6, 4)), layers.LSTM(8, recurrent_dropout=0.2, seed=3), layers.Dense(CLASSES)]
    )


def attention() -> keras.Model:
    x = inputs = keras.Input((6, 8))
    x = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=4)(x, x)
    x = layers.LayerNormalization()(layers.Add()([x, inputs]))
    x = layers.GlobalAveragePooling1D()(layers.Dense(16, "gelu")(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def convolutional() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(CLASSES),
        ]
    )


DENSE_KINDS = {f.__name__: f for f in (mlp, batch_norm, narrow, dropout, lstm, attention)}
KINDS = {**DENSE_KINDS, "convolutional": convolutional}


def make(kind: str, dtype: str, seed: int = 0) -> keras.Model:
    keras.utils.clear_session(free_memory=False)  # equal models have equal names
    keras.utils.set_random_seed(seed)
    policy = "mixed_bfloat16" if dtype == "bfloat16" else "float32"
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return KINDS[kind]()
    finally:
        keras.config.set_dtype_policy(before)


def batches(model: keras.Model, steps: int, size: int = 8) -> tuple[Any, Any]:
    """Stacked batches ``(x [steps, size, ...], y [steps, size])``."""
    rng = np.random.default_rng(0)
    shape = model.input_shape[1:]
    x = rng.normal(size=(steps, size, *shape)).astype(np.float32)
    return x, rng.integers(0, CLASSES, (steps, size)).astype(np.int32)
