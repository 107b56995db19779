"""Which layers may be compiled although they say they may not: those that are known to be pure."""

import warnings
import weakref
from typing import Any

import keras
from keras import layers

from bridge import keras_private

# Keras's layers with supports_jit=False that draw by a SeedGenerator they hold, whose counter is
# in the state, and by nothing else. They say so for the sake of another backend; JAX compiles them
# (RandomCrop only where it does not crop). Read in Keras 3.15.1, whose others with
# supports_jit=False look words and numbers up in Python.
_PURE = {
    layers.RandomCrop,
    layers.RandomPerspective,
    layers.RandomRotation,
    layers.RandomShear,
    layers.RandomTranslation,
    layers.RandomZoom,
}
# Keras's layers that draw by Python's `random`, or run code of the user's.
_IMPURE = {layers.AugMix}
_RUN_ANYTHING = {layers.FlaxLayer, layers.JaxLayer, layers.Lambda}
_RUN_ANYTHING |= {layers.TFSMLayer, layers.TorchModuleWrapper}
_KERAS_CLASSES = {keras.Sequential, *(c for c in vars(layers).values() if isinstance(c, type))}
_KNOWN = _KERAS_CLASSES - _IMPURE - _RUN_ANYTHING

_warned: weakref.WeakSet[type] = weakref.WeakSet()


def unknown_layers(model: keras.Layer) -> list[Any]:
    """Returns those of a model's layers, itself included, that are not known to be pure.

    A class is known by itself, and not by its name or what it inherits from.
    """
    return [layer for layer in keras_private.layers.all_layers(model) if not _is_known(layer)]


def frozen_layers(model: keras.Layer) -> list[Any]:
    """Returns those of a model's layers of which a compiled step does something only once.

    Either they say so by supports_jit=False, or they are Keras's own and draw in Python.
    """
    return [
        layer for layer in unknown_layers(model) if type(layer) in _IMPURE or not layer.supports_jit
    ]


def warn_of_frozen(model: keras.Layer) -> None:
    """Says once for a class of layers that what it draws in Python is drawn when it is traced."""
    classes = {type(layer) for layer in frozen_layers(model)} - set(_warned)
    if not classes:
        return
    _warned.update(classes)
    names = ", ".join(sorted(cls.__name__ for cls in classes))
    warnings.warn(
        f"{names}: Keras leaves models with this layer uncompiled. In a compiled step, what it "
        "does in Python (random, numpy.random, counters) is done once, when the step is traced, "
        "and not every time. To draw anew each time: keras.random with a "
        "keras.random.SeedGenerator held as an attribute, and supports_jit = True. To run the "
        "model as Keras does: bridge.fit.",
        stacklevel=3,
    )


def _is_known(layer: Any) -> bool:
    is_pure = type(layer) in _PURE or layer.supports_jit
    return keras_private.layers.is_functional(layer) or (type(layer) in _KNOWN and is_pure)
