"""Which steps can touch an object of Keras: found by looking at functions, without calling them."""

import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

# Of their functions only the closures are followed. Their globals hold nothing of a user's.
_LIBRARIES = {"bridge", "flax", "functrain", "jax", "jaxlib", "numpy", "optax"}
_LIBRARIES |= sys.stdlib_module_names
# A step that reaches more objects than this is taken for one that reaches Keras.
_MOST = 100_000


def reaches_keras(step: Any) -> bool:
    """Returns True if a function may use something of Keras: a model, a variable, `keras.random`.

    Followed are closures, defaults, the globals and imports that a function names, attributes and
    containers. So a program of pure JAX need not be traced under a guard for Keras's objects.
    """
    seen: dict[int, Any] = {}  # holds what it has seen, so that no id is used again
    to_visit = [step]
    while to_visit:
        x = to_visit.pop()
        if id(x) in seen or isinstance(x, jax.Array | np.ndarray | str | bytes):
            continue
        seen[id(x)] = x
        if _is_of_keras(x) or len(seen) > _MOST:
            return True
        to_visit.extend(_referents(x))
    return False


def _is_of_keras(x: Any) -> bool:
    if isinstance(x, types.ModuleType | types.FunctionType | type):
        return _package(x) == "keras"
    return any(_package(cls) == "keras" for cls in type(x).__mro__)


def _package(x: Any) -> str:
    name = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
    return str(name).partition(".")[0]


def _referents(x: Any) -> Iterable[Any]:
    if isinstance(x, types.FunctionType):
        held = (*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, vars(x))
        return held if _package(x) in _LIBRARIES else (*held, *_named(x))
    if isinstance(x, type):
        return () if _package(x) in _LIBRARIES else vars(x).values()
    if isinstance(x, types.ModuleType | types.CodeType | types.FrameType):
        return ()  # of a module, a function names what it uses
    return gc.get_referents(x)


def _named(function: types.FunctionType) -> Iterator[Any]:
    """Yields the globals and modules that a function names, and what it names of those modules."""
    names = set(_names(function.__code__))
    for name in names:
        for places in (function.__globals__, sys.modules):
            if name not in places:
                continue
            yield (value := places[name])
            if isinstance(value, types.ModuleType) and _package(value) not in _LIBRARIES:
                yield from (vars(value)[n] for n in names & vars(value).keys())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
