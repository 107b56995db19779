"""Detection of pure layers, which can be compiled although they have supports_jit=False."""

import itertools
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
# Keras layers that draw from Python's `random`, and those that run code of the user.
_IMPURE = {layers.AugMix}
_RUN_ANYTHING = {layers.FlaxLayer, layers.JaxLayer, layers.Lambda}
_RUN_ANYTHING |= {layers.TFSMLayer, layers.TorchModuleWrapper}
_KERAS_CLASSES = {keras.Sequential, *(c for c in vars(layers).values() if isinstance(c, type))}
_KNOWN = _KERAS_CLASSES - _IMPURE - _RUN_ANYTHING

_warned: weakref.WeakSet[type] = weakref.WeakSet()


def unknown_layers(model: keras.Layer) -> list[Any]:
    """Returns the layers of a model, including the model, that are not known to be pure."""
    return list(itertools.filterfalse(_is_pure, keras_private.layers.all_layers(model)))


def frozen_layers(model: keras.Layer) -> list[Any]:
    """Returns the layers of a model that do something in Python, only once in a compiled step.

    These are layers with supports_jit=False, and Keras layers that draw in Python.
    """
    return [x for x in unknown_layers(model) if type(x) in _IMPURE or not x.supports_jit]


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


def _is_pure(layer: Any) -> bool:
    # By exact class: a subclass, or a class of the same name, may do anything.
    can_be_compiled = type(layer) in _PURE or layer.supports_jit
    is_known = type(layer) in _KNOWN and can_be_compiled
    return is_known or keras_private.layers.is_functional(layer)
