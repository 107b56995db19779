"""Warnings about arrays and losses that train without an error, and learn little."""

from typing import Any

import keras
import numpy as np

from functrain.internal import is_cheap_to_read, warn

# Labels that are compared with the number of classes: enough to find a mistake, quick to read.
_LABELS = 100_000
_CROSSENTROPIES = (
    keras.losses.BinaryCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.SparseCategoricalCrossentropy,
)
_PROBABILITIES = (keras.activations.softmax, keras.activations.sigmoid)
# Layers after which the scale of an input does not matter, or which are made for integers.
_SCALING = (
    keras.layers.BatchNormalization,
    keras.layers.Embedding,
    keras.layers.LayerNormalization,
    keras.layers.Normalization,
    keras.layers.Rescaling,
)


def warn_of_data(model: keras.Model, x: Any, y: Any) -> None:
    """Warns of labels outside of the classes, a wrong `from_logits` and unscaled images.

    Looks at arrays in memory and at models with one output; says nothing of all others.
    """
    _warn_of_images(model, x)
    layer = _output_layer(model)
    if layer is None:
        return
    loss = model.loss
    if isinstance(loss, _CROSSENTROPIES) and getattr(loss, "from_logits", False):
        activation = getattr(layer, "activation", None)
        if activation in _PROBABILITIES or isinstance(layer, keras.layers.Softmax):
            warn(
                f"loss: expected logits from layer {layer.name!r}, as from_logits=True says, got "
                "probabilities. Leave out its activation, or pass from_logits=False."
            )
    is_sparse = isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
    if is_sparse or loss == "sparse_categorical_crossentropy":
        classes = _count_classes(model, loss)
        if classes is not None:
            _warn_of_labels(y, classes, getattr(loss, "ignore_class", None))


def _count_classes(model: keras.Model, loss: Any) -> int | None:
    """Returns the length of the output's last axis; None if it is unknown or not the classes."""
    if not isinstance(loss, str) and loss.get_config().get("axis", -1) != -1:
        return None
    try:
        shape = model.output_shape
    except (AttributeError, ValueError):
        # A Sequential whose layers cannot be called symbolically.
        return None
    return shape[-1] if isinstance(shape, tuple) and isinstance(shape[-1], int) else None


def _warn_of_labels(y: Any, classes: int, ignored: int | None) -> None:
    if not _is_cheap(y) or y.dtype.kind not in "iu":
        return
    labels = y[:_LABELS]
    wrong = labels[(labels < 0) | (labels >= classes)]
    if ignored is not None:
        wrong = wrong[wrong != ignored]
    if wrong.size:
        warn(
            f"y: expected labels from 0 to {classes - 1}, since the model has {classes} outputs, "
            f"got {wrong[0]}. Such a label has no class, and its loss means nothing."
        )


def _warn_of_images(model: keras.Model, x: Any) -> None:
    if not _is_cheap(x) or x.dtype != np.uint8 or x.ndim < 3 or x[:8].max(initial=0) <= 1:
        return
    layers = _layers(model)
    # A layer of the user's, and a model inside this one, may scale its inputs.
    is_known = all(vars(keras.layers).get(type(x).__name__) is type(x) for x in layers)
    scales = any(isinstance(layer, (*_SCALING, keras.layers.Lambda)) for layer in layers)
    if is_known and not scales:
        warn(
            "x: expected inputs of about unit scale, got uint8 from 0 to 255. Begin the model with "
            "keras.layers.Rescaling(1 / 255)."
        )


def _is_cheap(x: Any) -> bool:
    return isinstance(x, np.ndarray) and bool(x.ndim) and is_cheap_to_read(x)


def _layers(model: Any) -> list[Any]:
    # A layer of the user's may be a trainer without being a model.
    layers: list[Any] = getattr(model, "layers", [model])
    return layers


def _output_layer(model: keras.Model) -> Any:
    """Returns the layer with the only output of a model made of layers; None for other models."""
    if isinstance(model, keras.Sequential):
        return model.layers[-1] if model.layers else None
    names = getattr(model, "output_names", None) or ()
    # The output may be that of an operation, which is no layer.
    matching = [layer for layer in _layers(model) if [layer.name] == list(names)]
    return matching[0] if matching else None
