"""What Keras's private names for a layer and what is inside it mean (checked with Keras 3.15.1)."""

from bridge import keras_private  # isort: skip  # before keras: it chooses the backend

import keras
import numpy as np
from keras import layers


class Holder(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = layers.Dense(1)
        self.seed = keras.random.SeedGenerator(0)
        self.mean = keras.metrics.Mean()
        self.rest = [layers.Dense(1)]

    def build(self, input_shape):
        self.frozen = self.add_weight(shape=(), trainable=False)
        self.free = self.add_weight(shape=())

    def call(self, x):
        return self.rest[0](self.first(x))


def test_a_layer_lists_what_it_holds_itself():
    model = Holder()
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0)
    model.frozen.trainable = True  # the lists are those of the time of creation
    expected = [model.free, model.frozen, model.seed, model.mean, model.first, model.rest[0]]
    assert list(map(id, keras_private.layers.members(model))) == list(map(id, expected))


def test_layers_of_a_functional_model_has_those_attached_as_attributes():
    x = keras.Input((3,))
    model = keras.Model(x, layers.Dense(2)(x))
    model.extra = layers.Dense(3)
    assert model.extra in keras_private.layers.members(model)[-1:]
    assert model.extra not in model.layers


def test_flatten_layers_has_each_layer_once_and_the_model_itself():
    shared = layers.Dense(3)
    model = keras.Sequential([keras.Input((3,)), keras.Sequential([shared]), shared])
    found = keras_private.layers.all_layers(model)
    assert found[0] is model
    assert found.count(shared) == 1
    assert {id(layer) for layer in model.layers} < {id(layer) for layer in found}
