"""Architectures for `benchmarks.applications`: keras.applications, and layers in small models."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

CLASSES = 10
SIZES = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}


class Architecture(NamedTuple):
    """A model, and an example of its inputs.

    Attributes:
      build: Returns a new Keras model whose outputs are logits, `f32[B, ..., classes]`.
      example: Draws a batch of inputs.
    """

    build: Callable[[], keras.Model]
    example: Callable[[np.random.Generator], Any]


def application(name: str) -> Architecture:
    """Returns one of keras.applications, for 8 images of 32×32 or its minimum size."""
    shape = (SIZES.get(name, 32),) * 2 + (3,)
    make = getattr(keras.applications, name)
    options = {"weights": None, "classes": CLASSES, "classifier_activation": None}
    return Architecture(
        lambda: make(input_shape=shape, **options),
        lambda rng: rng.uniform(0, 255, (8, *shape)).astype(np.float32),
    )


def around(layer: Callable[[Any], Any], *shape: int) -> Architecture:
    """Returns a layer between two dense ones, so that it passes gradients on.

    Args:
      layer: A function that applies the layer.
      *shape: The shape of the batch.
    """

    def build() -> keras.Model:
        inputs = keras.Input(shape[1:])
        x = layers.Dense(shape[-1])(inputs)
        return keras.Model(inputs, layers.Dense(CLASSES)(layer(x)))

    return Architecture(build, lambda rng: rng.standard_normal(shape, np.float32))


APPLICATIONS = {
    name: application(name)
    for name, member in sorted(vars(keras.applications).items())
    if callable(member) and name[0].isupper()
}

# Batch, time, features.
_SEQUENCE = 16, 64, 128
_LAYERS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "MultiHeadAttention": (lambda x: layers.MultiHeadAttention(4, 32)(x, x), _SEQUENCE),
    "MultiHeadAttention-causal": (
        lambda x: layers.MultiHeadAttention(4, 32)(x, x, use_causal_mask=True),
        _SEQUENCE,
    ),
    "GroupQueryAttention": (lambda x: layers.GroupQueryAttention(32, 4, 2)(x, x), _SEQUENCE),
    "Attention": (lambda x: layers.Attention()([x, x]), _SEQUENCE),
    "AdditiveAttention": (lambda x: layers.AdditiveAttention()([x, x]), _SEQUENCE),
    "LSTM": (lambda x: layers.LSTM(128)(x), _SEQUENCE),
    "GRU": (lambda x: layers.GRU(128)(x), _SEQUENCE),
    "SimpleRNN": (lambda x: layers.SimpleRNN(128)(x), _SEQUENCE),
    "Bidirectional": (lambda x: layers.Bidirectional(layers.LSTM(64))(x), _SEQUENCE),
    "RNN-cells": (lambda x: layers.RNN([layers.LSTMCell(64) for _ in range(2)])(x), _SEQUENCE),
    "ConvLSTM1D": (lambda x: layers.ConvLSTM1D(32, 3, padding="same")(x), (8, 16, 64, 16)),
    "ConvLSTM2D": (lambda x: layers.ConvLSTM2D(16, 3, padding="same")(x), (8, 8, 32, 32, 8)),
    "TimeDistributed": (lambda x: layers.TimeDistributed(layers.Dense(256))(x), _SEQUENCE),
}
LAYERS = {name: around(layer, *shape) for name, (layer, shape) in _LAYERS.items()}
