"""Detection of steps that may use Keras objects, by inspecting functions without calling them."""

import gc
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

# For functions of these libraries only closures are followed: their globals contain no objects of
# the user.
_LIBRARIES = {"bridge", "flax", "functrain", "jax", "jaxlib", "numpy", "optax"}
_LIBRARIES |= sys.stdlib_module_names
# A step that reaches more objects is assumed to use Keras, which limits the time of the search.
_MAX_OBJECTS = 100_000


def reaches_keras(step: Any) -> bool:
    """Returns True if a function may use Keras: a model, a variable, `keras.random`.

    The search follows closures, defaults, the globals and imports whose names are in a function,
    attributes and containers. Steps of pure JAX need no guard against assignments to Keras
    variables while they are traced.
    """
    # The dict keeps the objects alive, so that no id is used again.
    visited: dict[int, Any] = {}
    to_visit = [step]
    while to_visit:
        x = to_visit.pop()
        if id(x) in visited or isinstance(x, jax.Array | np.ndarray | str | bytes):
            continue
        visited[id(x)] = x
        if _is_from_keras(x) or len(visited) > _MAX_OBJECTS:
            return True
        to_visit.extend(_referents(x))
    return False


def _is_from_keras(x: Any) -> bool:
    """Returns True for modules, functions and classes of Keras, and instances of its classes."""
    if isinstance(x, types.ModuleType | types.FunctionType | type):
        return _package(x) == "keras"
    return any(_package(cls) == "keras" for cls in type(x).__mro__)


def _package(x: Any) -> str:
    name = x.__name__ if isinstance(x, types.ModuleType) else x.__module__
    return str(name).partition(".")[0]


def _referents(x: Any) -> Iterable[Any]:
    """Returns the objects that an object refers to."""
    if isinstance(x, types.FunctionType):
        referents = (*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, vars(x))
        return referents if _package(x) in _LIBRARIES else (*referents, *_named_objects(x))
    if isinstance(x, type):
        return () if _package(x) in _LIBRARIES else (*vars(x).values(), *x.__bases__)
    # Not all contents of a module: `_named_objects` yields those that a function names.
    if isinstance(x, types.ModuleType | types.CodeType | types.FrameType):
        return ()
    return gc.get_referents(x)


def _named_objects(function: types.FunctionType) -> Iterator[Any]:
    """Yields the globals and modules that a function names, and named attributes of the modules."""
    names = set(_names_in_code(function.__code__))
    to_visit = _select(function.__globals__, names)
    to_visit += _select(sys.modules, _module_names(function, names))
    visited_ids: set[int] = set()
    while to_visit:
        value = to_visit.pop()
        yield value
        if not isinstance(value, types.ModuleType) or id(value) in visited_ids:
            continue
        visited_ids.add(id(value))
        # A module of Keras ends the search in any case.
        if _package(value) not in _LIBRARIES | {"keras"}:
            to_visit += _select(vars(value), names)


def _select(mapping: Mapping[str, Any], names: set[str]) -> list[Any]:
    return [mapping[name] for name in names & mapping.keys()]


def _module_names(function: types.FunctionType, names: set[str]) -> set[str]:
    """Returns the full names of the modules that a function with these names may import."""
    # The code of `from .deep import x` contains the name "deep", that of `from . import x` the name
    # "". Neither contains the number of dots, so that all packages above the function are tried.
    parts = (function.__globals__.get("__package__") or "").split(".")
    packages = [".".join(parts[:i]) for i in range(len(parts) + 1)]
    return {f"{package}.{name}".strip(".") for package in packages for name in names}


def _names_in_code(code: types.CodeType) -> Iterator[str]:
    """Yields the names in the code of a function and of the functions defined inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in_code(constant)
