"""Programs of a model: what is compiled, and for how long it is kept."""

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
from functrain.internal import jit

T = TypeVar("T")
Values: TypeAlias = list[jax.Array]

_advised: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_STEPS = ("train_step", "test_step", "predict_step")


def cached_for(model: keras.Model, name: str, make: Callable[[], T]) -> T:
    """Returns what `make` returned for a model, the same until the model is changed.

    It is kept in the model itself, so that both are freed together; and it is freed as soon as
    one of the objects that it was compiled for is, such as the optimizer.
    """
    cache: dict[str, tuple[list[Any], T]] = vars(model).setdefault("_bridge_cache", {})
    dependencies = _dependencies(model)
    entry = cache.get(name)
    if entry is None or not _are_same([reference() for reference in entry[0]], dependencies):

        def forget(_: Any) -> None:
            if cache.get(name) is entry:
                del cache[name]

        cache[name] = entry = ([_reference(x, forget) for x in dependencies], make())
    return entry[1]


def _dependencies(model: keras.Model) -> list[Any]:
    """Returns all objects that a compiled step depends on, but for the values of variables."""
    optimizer = getattr(model, "optimizer", None)  # a model that was not compiled may lack it
    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables if optimizer is not None else [],
        model.metrics_variables,
        model.metrics,
    )
    parts = [v for variables in lists for v in (*variables, None)]
    own_steps = [vars(model).get(name) for name in _STEPS]
    return [
        *keras_private.trainer.compiled_parts(model),
        *own_steps,
        type(model).train_step,
        *parts,
    ]


def _reference(x: Any, forget: Callable[[Any], None]) -> Callable[[], Any]:
    """Returns a function that returns `x`, and does not keep it alive if that is possible."""
    try:
        return weakref.ref(x, forget)
    except TypeError:  # None, among others
        return lambda: x


def _are_same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


class RunningMeans:
    """Resets and reads a model's metrics outside of their variables, in one program each.

    Only for models all of whose metrics are Keras's own running means and sums. Any other metric
    may do in Python what a program would do only once, and its result may have other last bits in
    a program: such metrics are reset and read by Keras, one after the other.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._variables = model.metrics_variables
        self.reset = jit(self._reset)
        self.read = jit(self._read)

    @staticmethod
    def of(model: keras.Model) -> "RunningMeans | None":
        """Returns those of a model; None if it has others, or variables on several devices."""
        if model.run_eagerly or keras.distribution.distribution() is not None:
            return None
        plain = keras_private.metrics.has_running_means_only
        return cached_for(model, "metrics", lambda: RunningMeans(model) if plain(model) else None)

    def reset_variables(self) -> None:
        """Resets the metrics in the model's variables."""
        values = self.reset([v.value for v in self._variables])
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def _reset(self, values: Values) -> Values:
        with self._scope(values) as scope:
            self._model.reset_metrics()
        return [scope.get_current_value(v) for v in self._variables]

    def _read(self, values: Values) -> dict[str, jax.Array]:
        with self._scope(values):
            return dict(self._model.get_metrics_result())

    def _scope(self, values: Values) -> Any:
        return keras.StatelessScope(list(zip(self._variables, values, strict=True)))


def runs_uncompiled(model: keras.Model, rewrites: str, trace: Callable[[], Any]) -> bool:
    """Returns True if a step runs operation by operation.

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
    has_own_steps = any(name in vars(model) for name in _STEPS)  # which may run any Python code
    if unknown := [model] if has_own_steps else unknown_layers(model):
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
    """Returns True if a step can be traced without drawing from Python's or NumPy's randomness."""
    before = random_state()
    try:
        trace()
    except Exception:  # Keras makes others of jax's errors; the model's own comes once more
        return False
    else:
        return repr(_as_lists(before)) == repr(_as_lists(random_state()))
    finally:
        set_random_state(before)


def _as_lists(tree: Any) -> Any:
    """Returns a tree with lists for its arrays, which can be compared as a whole."""
    return jax.tree.map(lambda x: x.tolist() if isinstance(x, np.ndarray) else x, tree)
