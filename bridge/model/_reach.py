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
        return () if _package(x) in _LIBRARIES else (*vars(x).values(), *x.__bases__)
    if isinstance(x, types.ModuleType | types.CodeType | types.FrameType):
        return ()  # of a module, a function names what it uses
    return gc.get_referents(x)


def _named(function: types.FunctionType) -> Iterator[Any]:
    """Yields the globals and modules that a function names, and what it names of those modules."""
    names = set(_names(function.__code__))
    variables = function.__globals__
    to_visit = [variables[name] for name in names & variables.keys()]
    to_visit += [sys.modules[name] for name in _module_names(function, names) & sys.modules.keys()]
    seen: set[int] = set()
    while to_visit:
        yield (value := to_visit.pop())
        if not isinstance(value, types.ModuleType) or id(value) in seen:
            continue
        seen.add(id(value))
        if _package(value) not in _LIBRARIES | {"keras"}:
            to_visit += [vars(value)[name] for name in names & vars(value).keys()]


def _module_names(function: types.FunctionType, names: set[str]) -> set[str]:
    """Returns the full names of the modules that a function may import by `names`.

    The code of `from .deep import x` names "deep", that of `from . import x` names "": neither says
    how many packages the import goes up, so that all those above the function are tried.
    """
    parts = (function.__globals__.get("__package__") or "").split(".")
    packages = [".".join(parts[:i]) for i in range(len(parts) + 1)]
    return {f"{package}.{name}".strip(".") for package in packages for name in names}


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
