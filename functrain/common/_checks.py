"""Argument checks. Their errors read "name: expected X, got Y. Advice"."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np

from functrain.common import _repr, _tree

_NUMBERS = bool | int | float | np.number | np.bool_ | np.ndarray | jax.Array


def require(
    condition: Any,
    name: str,
    expected: str,
    got: Any,
    advice: str = "",
    *,
    error: type[Exception] = ValueError,
) -> None:
    """Raises "name: expected X, got Y. Advice" unless a condition holds.

    Args:
      condition: Must be true.
      name: The name of the argument.
      expected: A description of the values that are accepted.
      got: The value. Arrays and pytrees are shown by dtype, shape and size.
      advice: What to do instead, as full sentences.
      error: The class of the exception.

    Examples:
      >>> decay = 1.5
      >>> require(0 <= decay < 1, "decay", "a number from 0 up to 1, exclusive", decay)
      Traceback (most recent call last):
      ValueError: decay: expected a number from 0 up to 1, exclusive, got 1.5.
    """
    if not condition:
        raise error(f"{name}: expected {expected}, got {_repr.brief(got)}. {advice}".rstrip())


def require_no_problems(
    name: str,
    problems: Sequence[str] | str,
    expected: str,
    advice: str = "",
    *,
    error: type[Exception] = ValueError,
) -> None:
    """Raises an error that lists the problems, one per line, if there are any.

    Args:
      name: The name of the argument.
      problems: Lines, such as those of `_tree.differences`, or the text of `_tree.format_leaves`.
      expected: A description of the values that are accepted.
      advice: What to do instead, as full sentences.
      error: The class of the exception.
    """
    if problems:
        lines = problems if isinstance(problems, str) else _tree.bullets(list(problems))
        raise error(f"{name}: expected {expected}, got\n{lines}\n{advice}".rstrip())


def require_integer(name: str, value: Any, minimum: int = 1, advice: str = "") -> None:
    """Raises ValueError unless a value is an integer of at least `minimum`."""
    expected = f"an integer of at least {minimum}"
    require(is_integer(value, minimum), name, expected, value, advice)


def require_one_of(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raises ValueError unless a value is one of the choices.

    Examples:
      >>> require_one_of("mode", "best", ("min", "max"))
      Traceback (most recent call last):
      ValueError: mode: expected 'min' or 'max', got 'best'.
    """
    # The type is checked first: an array has no single truth value for `==`, and a list no hash.
    is_choice = isinstance(value, str | int | None) and value in choices
    require(is_choice, name, " or ".join(map(repr, choices)), value)


def require_instance(name: str, value: Any, classes: Any, expected: str, advice: str = "") -> None:
    """Raises TypeError unless a value is an instance of the classes that `expected` describes."""
    if not isinstance(value, classes):
        # A class in place of its instance is a common mistake: "got type" would not name it.
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name}: expected {expected}, got {got}. {advice}".rstrip())


def is_integer(value: Any, minimum: int) -> TypeGuard[int]:
    """Returns True for an integer of at least `minimum`; bools do not count as integers."""
    has_type = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(has_type and value >= minimum)


def is_positive(value: Any) -> bool:
    """Returns True for a positive, finite real number; bools do not count as numbers."""
    is_real = isinstance(value, int | float | np.integer | np.floating)
    return bool(is_real and not isinstance(value, bool) and value > 0 and math.isfinite(value))


def is_number(value: Any) -> bool:
    """Returns True for a single number, which may be an array without axes."""
    return isinstance(value, _NUMBERS) and not np.ndim(value)


def require_untraced(name: str, tree: Any) -> None:
    """Raises TypeError if the caller is being traced by jit, grad or vmap.

    Args:
      name: The name of the argument.
      tree: The argument. If it has no tracer among its leaves, only jit is detected.
    """
    # From 0.10 on, jax warns about generators among the leaves unless they are declared as leaves.
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Iterator))
    if _tree.is_in_jit() or any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise TypeError(
            f"{name}: expected arrays that have values, got a call within jax.jit, grad, vmap or "
            "another transformation. Call fit, run, evaluate and predict outside of it; inside, "
            "take steps with functrain.fuse(step, k) or jax.lax.scan."
        )
