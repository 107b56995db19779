"""The private Keras names mean what the bridge takes them to mean (checked with Keras 3.15.1)."""

import ast
import pathlib

import keras
import numpy as np
from keras import layers

import bridge
from bridge import _keras_private


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


def test_layers_is_what_a_layer_tracks_in_order():
    model = Holder()
    assert _keras_private.sublayers(model) == [model.first, model.rest[0]]


def test_layers_of_a_functional_model_has_those_attached_as_attributes():
    x = keras.Input((3,))
    model = keras.Model(x, layers.Dense(2)(x))
    model.extra = layers.Dense(3)
    assert model.extra in _keras_private.sublayers(model)
    assert model.extra not in model.layers


def test_trainable_variables_and_non_trainable_variables_are_a_layers_own():
    model = Holder()
    model(np.ones((1, 3)))
    model.frozen.trainable = True  # the lists are those of the time of creation
    assert [id(v) for v in _keras_private.own_variables(model)] == [
        id(model.free),
        id(model.frozen),
    ]


def test_seed_generators_is_a_layers_own():
    model = Holder()
    assert _keras_private.seed_generators(model) == [model.seed]


def test_metrics_has_those_of_attributes_and_not_those_of_compile():
    model = Holder()
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0)
    assert _keras_private.own_metrics(model) == [model.mean]


def test_losses_override_hides_the_losses_of_a_call():
    layer = layers.Dense(1, kernel_regularizer="l2")
    layer.build((None, 3))
    layer._losses_override.append("left behind")
    assert layer.losses == ["left behind"]
    _keras_private.forget_losses(layer)
    assert float(layer.losses[0]) > 0


def test_no_other_file_of_the_bridge_touches_a_private_name_of_keras():
    for file in pathlib.Path(bridge.__file__).parent.glob("*.py"):
        if file.name == "_keras_private.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                owner = ast.unparse(node.value)
                ours = owner in {"self", "found", "where", "bridge"} or node.attr.startswith("__")
                assert ours, f"{file.name}: {owner}.{node.attr}"
