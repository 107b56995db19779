"""Signatures of functions, and advice on arguments with other libraries' names."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from functrain.common import _repr

P = ParamSpec("P")
T = TypeVar("T")


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


def _suggest(keyword: str, keywords: Sequence[str]) -> str:
    """Returns advice for a keyword that a function does not have."""
    similar = difflib.get_close_matches(keyword, keywords, n=1)
    return (
        f"Did you mean {similar[0]}=?" if similar else f"Its arguments are {', '.join(keywords)}."
    )


def argument_advice(
    positional: str, /, *, check_first: Callable[[Any], None] | None = None, **advice: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: a TypeError about unexpected arguments says what to do instead.

    Args:
      positional: The advice if there are too many positional arguments.
      check_first: Called with the first argument before the other checks; may raise an error that
        fits better.
      **advice: The advice for keywords that the function does not have, such as `batch_size`, which
        Keras's `fit` has. For others it is the most similar keyword.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kinds = [p.kind for p in parameters(function).values()]
        keywords = parameters(function).keys()
        takes_any_keyword = inspect.Parameter.VAR_KEYWORD in kinds
        first = next(iter(parameters(function)))
        name = function.__qualname__.removesuffix(".__init__")
        # `self` is not an argument to the caller, so it is not counted.
        is_method = name != function.__qualname__
        max_count = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - is_method

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if check_first is not None and (args or first in kwargs):
                check_first(args[0] if args else kwargs[first])
            count = len(args) - is_method
            if count > max_count:
                plural = "s" * (max_count != 1)
                raise TypeError(
                    f"{name}: expected {max_count} positional argument{plural}, got {count}. "
                    f"{positional}"
                )
            for keyword in () if takes_any_keyword else kwargs.keys() - keywords:
                text = advice.get(keyword) or _suggest(keyword, sorted(keywords))
                raise TypeError(f"{name}: expected no {keyword}=. {text}")
            return function(*args, **kwargs)

        return checked

    return decorate
