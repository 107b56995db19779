"""Whether a step of a Keras model is compiled, or run one operation at a time as Keras does."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge._randomness import put_randomness, randomness
from bridge.model._pure_layers import frozen_layers, unknown_layers

_advised: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_STEPS = ("train_step", "test_step", "predict_step")


def runs_uncompiled(model: keras.Model, rewrites: str, trace: Callable[[], Any]) -> bool:
    """Whether a step runs operation by operation.

    What Keras compiles is compiled. A model that it leaves uncompiled, because a layer such as
    RandomRotation says that another backend could not, is compiled if nothing in it can differ:
    all layers are known to be pure, and a trace draws no Python or NumPy randomness. It stays
    uncompiled where ``compile(run_eagerly=True)`` or ``rewrites="exact"`` asks for that. Keras
    3.15.1 does not keep whether the False in `jit_compile` was asked for or found out.

    Args:
      model: The model.
      rewrites: As for `functrain.fuse`.
      trace: Traces a step.
    """
    if model.run_eagerly or model.jit_compile:
        return bool(model.run_eagerly)
    layers = keras_private.layers.all_layers(model)
    if rewrites == "exact" or all(layer.supports_jit for layer in layers):
        return True
    own_steps = any(name in vars(model) for name in _STEPS)  # they may run any Python code
    if unknown := [model] if own_steps else unknown_layers(model):
        _advise(model, unknown)
        return True
    return not _traces_without_drawing(trace)


def _advise(model: keras.Model, unknown: list[Any]) -> None:
    """Says once for a model how to have it compiled, where its author may well know better."""
    if model in _advised or frozen_layers(model):
        return
    _advised.add(model)
    names = ", ".join(sorted({type(layer).__name__ for layer in unknown}))
    warnings.warn(
        f"model {model.name!r} runs uncompiled, which is slow: as in Keras, because of layers with "
        f"supports_jit=False. JAX could compile those, but {names} may do anything in Python, "
        "which a program would do only once. If that is not so, say layer.supports_jit = True for "
        "those layers and compile the model again; if it is, compile(run_eagerly=True).",
        stacklevel=2,
    )


def _traces_without_drawing(trace: Callable[[], Any]) -> bool:
    """Whether a step can be traced, and leaves Python's and NumPy's randomness as it was."""
    before = randomness()
    try:
        trace()
    except Exception:  # Keras makes others of jax's errors; the model's own comes once more
        return False
    else:
        return _leaves(before) == _leaves(randomness())
    finally:
        put_randomness(before)


def _leaves(tree: Any) -> list[Any]:
    """Returns the numbers of a tree, and where it has None."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    return [x.tolist() if isinstance(x, np.ndarray) else x for x in leaves]
