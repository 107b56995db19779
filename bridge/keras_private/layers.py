"""What a layer holds itself, and the layers inside it."""

from typing import Any

import keras


def members(layer: keras.Layer) -> list[Any]:
    """Returns the variables, seed generators, metrics and layers that a layer itself holds.

    Variables that were created as trainable come first. Metrics of `compile` are left out. Reads
    `Layer._trainable_variables`, `_non_trainable_variables`, `_seed_generators`, `_metrics` and
    `_layers`; checked with Keras 3.15.1. The public lists are flat over the whole tree, so that
    without these it is unknown which layer holds which variable, and there are no stable paths.
    `Model.layers` also leaves out layers that are attached to a Functional model.
    """
    return [
        *layer._trainable_variables,
        *layer._non_trainable_variables,
        *layer._seed_generators,
        *layer._metrics,
        *layer._layers,
    ]


def all_layers(layer: keras.Layer) -> list[Any]:
    """Returns a layer and all layers inside it, at any depth, each once.

    Calls `Layer._flatten_layers`; checked with Keras 3.15.1. Without it each walk over a model
    needs a recursion.
    """
    return list(layer._flatten_layers())
