"""Layers with supports_jit=False: which JAX can compile, and which draw in Python."""

import keras
from keras import layers

from bridge import keras_private
from functrain.internal import warn

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


def may_be_compiled(layer: keras.Layer) -> bool:
    """Returns False for a layer of Keras's that JAX cannot compile, such as IntegerLookup."""
    return type(layer) in _PURE or type(layer) not in _KERAS_CLASSES


def warn_of_python_layers(model: keras.Layer) -> None:
    """Warns of layers that do something in Python, which happens once in a compiled step."""
    names: set[str] = set()
    for layer in keras_private.layers.all_layers(model):
        # By exact class: a subclass may do anything. AugMix draws from Python's `random`.
        runs_python = not layer.supports_jit and type(layer) not in _PURE
        if runs_python or type(layer) is layers.AugMix:
            names.add(type(layer).__name__)
    if names:
        warn(
            f"{', '.join(sorted(names))}: Keras does not compile models with this layer. In a "
            "compiled step, its Python code (random, numpy.random, counters) runs only once, when "
            "the step is traced. Draw by keras.random with a SeedGenerator held as an attribute "
            "and set supports_jit = True, or run the model as Keras does: bridge.fit."
        )
