"""A model's compiled programs: which steps are compiled, and how long programs are cached."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from bridge import keras_private
from bridge.model._pure_layers import may_be_compiled
from bridge.state._keras_state import variable_lists
from functrain.internal import warn

T = TypeVar("T")

# Models whose user has been told that they run uncompiled.
_warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_STEPS = ("train_step", "test_step", "predict_step")


def cached_for(model: keras.Model, kind: str, make: Callable[[], T]) -> T:
    """Returns the result of `make`, for "train", "test" or "predict", cached as long as Keras does.

    `model.compile` and `model.make_train_function(force=True)` end that, as does a change of the
    model's variables or metrics. Other changes have no effect, as in Keras: attributes of a layer
    and what a loss refers to are compiled in.

    It is cached in the model itself, so that both are freed together, and removed as soon as
    one of the objects for which it was compiled is freed, such as the optimizer.
    """
    # Written past Keras's __setattr__, which would track the objects in the cache. The references
    # are weak, so that a model that is compiled again frees the optimizer that it had before.
    cache: dict[str, tuple[list[Any], T]] = vars(model).setdefault("_bridge_cache", {})
    dependencies = _dependencies(model, kind)
    entry = cache.get(kind)
    # Compared by identity: to compare variables by value would wait for the device.
    ids = [] if entry is None else [id(reference()) for reference in entry[0]]
    if entry is None or ids != list(map(id, dependencies)):

        def forget(_: Any) -> None:
            # A newer entry may be in its place.
            if cache.get(kind) is entry:
                del cache[kind]

        cache[kind] = entry = ([_reference(x, forget) for x in dependencies], make())
    return entry[1]


def _dependencies(model: keras.Model, kind: str) -> list[Any]:
    """Returns all objects that a compiled step depends on, except the values of variables."""
    dependencies = keras_private.trainer.compiled_parts(model)
    dependencies.append(keras_private.trainer.step_function(model, kind))
    # A user may have replaced a step in the object or in the class.
    dependencies += map(vars(model).get, _STEPS)
    dependencies += [getattr(type(model), name) for name in _STEPS]
    for objects in (*variable_lists(model).values(), model.metrics):
        # None marks the end of a list, so that a variable that moves to another list is noticed.
        dependencies += [*objects, None]
    return dependencies


def _reference(x: Any, forget: Callable[[Any], None]) -> Callable[[], Any]:
    """Returns a weak reference to `x`, or a function that returns it if there cannot be one."""
    try:
        return weakref.ref(x, forget)
    except TypeError:
        # There are no weak references to None, for example.
        return lambda: x


def runs_uncompiled(model: keras.Model) -> bool:
    """Returns True if a model's steps run operation by operation, as they do in Keras.

    Warns once for each model that does only because of layers that JAX may compile.
    """
    if model.run_eagerly:
        return True
    if model.jit_compile:
        return False
    layers = [x for x in keras_private.layers.all_layers(model) if not x.supports_jit]
    if layers and model not in _warned and all(map(may_be_compiled, layers)):
        _warned.add(model)
        names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        warn(
            f"model {model.name!r} runs uncompiled, which is slow: as in Keras, because of {names} "
            "with supports_jit=False, which another backend cannot compile. If the layers have no "
            "side effects in Python, which a compiled program has only once, set "
            "layer.supports_jit = True and compile the model again; otherwise use "
            "compile(run_eagerly=True)."
        )
    return True
