"""What the tests of private names share: a compiled model, and batches for it."""

from bridge import keras_private  # isort: skip  # before keras: it chooses the backend

import keras
import numpy as np
from keras import layers


def compiled(**kwargs):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"], **kwargs)
    return model


def epochs(**kwargs):
    data = {"x": np.arange(30.0).reshape(10, 3), "y": np.zeros((10, 2)), "batch_size": 4}
    return keras_private.data.epochs(**{**data, **kwargs})
