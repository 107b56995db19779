"""Compiled programs live as long as the step they were made of."""

import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

Program = Callable[..., Any]

# id(step) -> (the step, weakly; its programs). Keyed by identity, and never by a strong reference:
# a step closes over models and optimizers, which must be free to go.
_programs: dict[int, tuple[weakref.ref[Any], dict[Hashable, Program]]] = {}


def cached(step: Any, key: Hashable, build: Callable[[Callable[[], Any]], Program]) -> Program:
    """Returns the program of a step under a key, built at the first call.

    So that two calls of `fit` with one step compile once.

    Args:
      step: The step. The caller keeps it alive for as long as it uses the program.
      key: Tells the programs of one step apart.
      build: Given a function that returns the step, makes the program. The program must reach the
        step through that function only.
    """
    anchor, key, get = _anchored(step, key)
    try:
        reference = weakref.ref(anchor)
    except TypeError:  # an object without weak references
        return build(lambda: step)
    identity = id(anchor)
    known = _programs.get(identity)
    if known is None or known[0]() is not anchor:
        weakref.finalize(anchor, _programs.pop, identity, None)
        known = _programs[identity] = (reference, {})
    programs = known[1]
    if key not in programs:
        programs[key] = build(lambda: get(reference()))
    return programs[key]


def _anchored(step: Any, key: Hashable) -> tuple[Any, Hashable, Callable[[Any], Any]]:
    """Returns what lives as long as the step: itself, or the object whose method it is."""
    if isinstance(step, types.MethodType):  # made anew at each look-up
        function = step.__func__
        return step.__self__, (function, key), lambda owner: types.MethodType(function, owner)
    return step, key, lambda step: step
