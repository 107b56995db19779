"""Signatures of functions."""

import inspect
from collections.abc import Mapping
from typing import Any

from functrain.common import _repr


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function by name; empty if it has no signature."""
    # Some builtins and C extensions have no signature: `inspect` raises either of these for them.
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def accepts(function: Any, count: int, *keywords: str) -> bool:
    """Returns False if a function cannot be called with these arguments.

    Args:
      function: The function; one without a signature counts as accepting any arguments.
      count: The number of positional arguments.
      *keywords: The names of the keyword arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def describe_signature(function: Any) -> str:
    """Returns the name of a function with the names of its parameters."""
    return f"{_repr.name(function)}({', '.join(parameters(function))})"
