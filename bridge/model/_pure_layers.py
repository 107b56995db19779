"""Layers with supports_jit=False: which JAX can compile, and which draw in Python."""

import warnings
import weakref
from typing import Any

import keras
from keras import layers

from bridge import keras_private

# Keras layers with supports_jit=False whose only randomness is a SeedGenerator that they hold, so
# that its counter is in the state. The flag is there for another backend; JAX compiles them
# (RandomCrop only if it does not crop). Checked in the sources of Keras 3.15.1, in which all other
# layers with supports_jit=False look up words or numbers in Python.
_PURE = {
    layers.RandomCrop,
    layers.RandomPerspective,
    layers.RandomRotation,
    layers.RandomShear,
    layers.RandomTranslation,
    layers.RandomZoom,
}
_KERAS_CLASSES = {c for c in vars(layers).values() if isinstance(c, type)}

_warned: weakref.WeakSet[type] = weakref.WeakSet()


def may_be_compiled(layer: keras.Layer) -> bool:
    """Returns False for a layer of Keras's that JAX cannot compile, such as IntegerLookup."""
    return type(layer) in _PURE or type(layer) not in _KERAS_CLASSES


def frozen_layers(model: keras.Layer) -> list[Any]:
    """Returns the layers of a model that do something in Python, only once in a compiled step.

    These are layers with supports_jit=False, and AugMix, which draws from Python's `random`.
    """
    layers_of_model = keras_private.layers.all_layers(model)
    return [x for x in layers_of_model if type(x) is layers.AugMix or _is_frozen(x)]


def warn_of_frozen(model: keras.Layer) -> None:
    """Warns, once for each class, of layers that draw in Python only when they are traced."""
    classes = set(map(type, frozen_layers(model))) - set(_warned)
    if not classes:
        return
    _warned.update(classes)
    names = ", ".join(sorted(cls.__name__ for cls in classes))
    warnings.warn(
        f"{names}: Keras does not compile models with this layer. In a compiled step, its Python "
        "code (random, numpy.random, counters) runs only once, when the step is traced. To draw "
        "in every step, use keras.random with a keras.random.SeedGenerator held as an attribute, "
        "and set supports_jit = True. To run the model as Keras does, use bridge.fit.",
        stacklevel=3,
    )


def _is_frozen(layer: Any) -> bool:
    # By exact class: a subclass may do anything.
    return not layer.supports_jit and type(layer) not in _PURE
