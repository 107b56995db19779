"""A model's compiled programs: which steps are compiled, and how long programs are cached."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge._randomness import random_state, set_random_state
from bridge.model._pure_layers import frozen_layers, unknown_layers
from bridge.state._keras_state import variable_lists
from functrain.internal import jit

T = TypeVar("T")
Values: TypeAlias = list[jax.Array]

# Models whose user has been told that they run uncompiled.
_warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_STEPS = ("train_step", "test_step", "predict_step")


def cached_for(model: keras.Model, name: str, make: Callable[[], T]) -> T:
    """Returns the result of `make`, cached until the model is changed.

    It is cached in the model itself, so that both are freed together, and removed as soon as
    one of the objects for which it was compiled is freed, such as the optimizer.
    """
    # Written past Keras's __setattr__, which would track the objects in the cache. The references
    # are weak, so that a model that is compiled again frees the optimizer that it had before.
    cache: dict[str, tuple[list[Any], T]] = vars(model).setdefault("_bridge_cache", {})
    dependencies = _dependencies(model)
    entry = cache.get(name)
    # Compared by identity: to compare variables by value would wait for the device.
    ids = [] if entry is None else [id(reference()) for reference in entry[0]]
    if entry is None or ids != list(map(id, dependencies)):

        def forget(_: Any) -> None:
            # A newer entry may be in its place.
            if cache.get(name) is entry:
                del cache[name]

        cache[name] = entry = ([_reference(x, forget) for x in dependencies], make())
    return entry[1]


def _dependencies(model: keras.Model) -> list[Any]:
    """Returns all objects that a compiled step depends on, except the values of variables."""
    dependencies = keras_private.trainer.compiled_parts(model)
    # A user may have replaced a step in the object or in the class.
    dependencies += map(vars(model).get, _STEPS)
    dependencies.append(type(model).train_step)
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


class RunningMeans:
    """Programs that reset and read a model's metrics, outside of their variables.

    They are used only if all metrics are Keras's own running means and sums. Any other metric
    may have side effects in Python, which a program would run only once, and its result may have
    other last bits in a program: Keras resets and reads such metrics, one after the other.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._variables = model.metrics_variables
        self.reset = jit(self._reset)
        self.read = jit(self._read)

    @staticmethod
    def of(model: keras.Model) -> "RunningMeans | None":
        """Returns the programs of a model; None if it has other metrics, or is distributed."""
        if model.run_eagerly or keras.distribution.distribution() is not None:
            return None

        def make() -> RunningMeans | None:
            is_plain = keras_private.metrics.has_running_means_only(model)
            return RunningMeans(model) if is_plain else None

        return cached_for(model, "metrics", make)

    def reset_variables(self) -> None:
        """Resets the metrics in the model's variables."""
        values = self.reset([v.value for v in self._variables])
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def _reset(self, values: Values) -> Values:
        with self._scope(values) as scope:
            self._model.reset_metrics()
        return list(map(scope.get_current_value, self._variables))

    def _read(self, values: Values) -> dict[str, jax.Array]:
        with self._scope(values):
            return dict(self._model.get_metrics_result())

    def _scope(self, values: Values) -> Any:
        return keras.StatelessScope(list(zip(self._variables, values, strict=True)))


def runs_uncompiled(model: keras.Model, rewrites: str, trace: Callable[[], Any]) -> bool:
    """Returns True if a step has to run operation by operation.

    A step that Keras compiles is compiled. If Keras does not, because a layer such as
    RandomRotation cannot be compiled on another backend, the step is compiled if that changes no
    result: all layers are known to be pure, and tracing draws no Python or NumPy randomness. It
    stays uncompiled with ``compile(run_eagerly=True)`` or ``rewrites="exact"``. Keras 3.15.1 does
    not record whether the user set ``jit_compile=False`` or Keras derived it.

    Args:
      model: The model.
      rewrites: As for `functrain.fuse`.
      trace: Traces a step.
    """
    # jit_compile is False as well if run_eagerly is True.
    if model.run_eagerly or model.jit_compile:
        return bool(model.run_eagerly)
    layers = keras_private.layers.all_layers(model)
    if rewrites == "exact" or all(layer.supports_jit for layer in layers):
        return True
    # A step that the user set on the object may run any Python code.
    has_own_steps = not vars(model).keys().isdisjoint(_STEPS)
    unknown = [model] if has_own_steps else unknown_layers(model)
    if unknown:
        _warn_of_uncompiled(model, unknown)
        return True
    return not _traces_without_drawing(trace)


def _warn_of_uncompiled(model: keras.Model, unknown: list[Any]) -> None:
    """Warns once for each model that it runs uncompiled, and says how to have it compiled."""
    # Keras runs these layers uncompiled as well, and compiling them would freeze what they draw.
    if model in _warned or frozen_layers(model):
        return
    _warned.add(model)
    names = ", ".join(sorted({type(layer).__name__ for layer in unknown}))
    warnings.warn(
        f"model {model.name!r} runs uncompiled, which is slow: as in Keras, because of layers with "
        f"supports_jit=False. JAX could compile those, but {names} may have side effects in "
        "Python, which a compiled program would run only once. If there are none, set "
        "layer.supports_jit = True for those layers and compile the model again; otherwise use "
        "compile(run_eagerly=True).",
        stacklevel=2,
    )


def _traces_without_drawing(trace: Callable[[], Any]) -> bool:
    """Returns True if a step can be traced without drawing from Python's or NumPy's randomness."""
    # The trace is only a test. Afterwards the generators are as they were, so that the run draws
    # the same numbers as one that was not tested.
    before = random_state()
    try:
        trace()
    except Exception:
        # Keras replaces jax's errors with other classes. An error of the model is raised again
        # when the step runs.
        return False
    else:
        # The repr of a long array leaves out elements, that of a list shows all of them.
        return repr(_as_lists(before)) == repr(_as_lists(random_state()))
    finally:
        set_random_state(before)


def _as_lists(tree: Any) -> Any:
    """Returns a tree with lists in place of its arrays."""
    return jax.tree.map(lambda x: x.tolist() if isinstance(x, np.ndarray) else x, tree)
