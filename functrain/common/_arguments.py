"""What functions take, and words for arguments that people bring from other libraries."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Returns what a function takes, by name; nothing where it has no signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def argument_advice(
    positional: str, /, *, first: Callable[[Any], None] = lambda argument: None, **advice: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Says of arguments that a function does not take what to do instead.

    Args:
      positional: What to say where there are too many of them.
      first: Looks at the first argument before that, and may raise something better.
      **advice: What to say of a keyword.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        taken = parameters(function).values()
        name = function.__qualname__.removesuffix(".__init__")
        own = name != function.__qualname__  # self
        most = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in taken) - own

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if args:
                first(args[0])
            if len(args) - own > most:
                plural = "s" * (most != 1)
                raise TypeError(
                    f"{name}: expected {most} argument{plural} without a name, got "
                    f"{len(args) - own}. {positional}"
                )
            for keyword in kwargs:
                if keyword in advice:
                    raise TypeError(f"{name}: expected no {keyword}=. {advice[keyword]}")
            return function(*args, **kwargs)

        return checked

    return decorate
