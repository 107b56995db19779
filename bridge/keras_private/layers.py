"""What a layer holds itself, and the layers inside it."""

from typing import Any

import keras


def sublayers(layer: keras.Layer) -> list[Any]:
    """Returns the layers that a layer tracks itself, in Keras's own order.

    Reads `Layer._layers`; checked with Keras 3.15.1. The public `Model.layers` exists on models
    only, and in a Functional model leaves out layers attached as attributes. Without it no
    variable of a sublayer is collected.
    """
    return list(layer._layers)


def own_variables(layer: keras.Layer) -> list[Any]:
    """Returns the variables that a layer holds itself: trainable ones, then the others.

    Reads `Layer._trainable_variables` and `Layer._non_trainable_variables`; checked with Keras
    3.15.1. The public lists are flat over the whole tree; without these two it is unknown which
    layer holds which variable, and there are no stable paths.
    """
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def seed_generators(layer: keras.Layer) -> list[Any]:
    """Returns the SeedGenerators that a layer holds itself.

    Reads `Layer._seed_generators`; checked with Keras 3.15.1. Without it a seed counter cannot be
    told from any other variable, and nothing can be reseeded from a key.
    """
    return list(layer._seed_generators)


def own_metrics(layer: keras.Layer) -> list[Any]:
    """Returns the metrics that a layer holds itself, without those of `compile`.

    Reads `Layer._metrics`; checked with Keras 3.15.1. The public `Model.metrics` mixes in the
    compiled ones and leaves out those of nested models. Without it a metric that is updated
    inside `call` is an update that no list holds.
    """
    return list(layer._metrics)


def all_layers(layer: keras.Layer) -> list[Any]:
    """Returns a layer and all layers inside it, at any depth, each once.

    Calls `Layer._flatten_layers`; checked with Keras 3.15.1. Without it each walk over a model
    needs a recursion.
    """
    return list(layer._flatten_layers())
