"""Argument checks. Their errors read "name: expected X, got Y. Advice"."""

import math
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
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
      condition: What has to be true.
      name: The argument.
      expected: What it should be.
      got: Its value. Arrays and pytrees are shown by dtype, shape and size.
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
    wrong: Sequence[str] | str,
    expected: str,
    advice: str = "",
    *,
    error: type[Exception] = ValueError,
) -> None:
    """Raises an error that lists what is wrong, a line each, if there is anything.

    Args:
      name: The argument.
      wrong: Lines, such as those of `_tree.differences`, or the text of `_tree.format_leaves`.
      expected: What the argument should be.
      advice: What to do instead, as full sentences.
      error: The class of the exception.
    """
    if wrong:
        lines = wrong if isinstance(wrong, str) else _tree.bullets(list(wrong))
        raise error(f"{name}: expected {expected}, got\n{lines}\n{advice}".rstrip())


def require_integer(name: str, value: Any, minimum: int = 1, advice: str = "") -> None:
    """Raises ValueError unless a value is an integer of at least `minimum`."""
    require(is_integer(value, minimum), name, f"a whole number from {minimum} on", value, advice)


def require_one_of(name: str, value: Any, choices: Collection[Any], advice: str = "") -> None:
    """Raises ValueError unless a value is one of some choices.

    Examples:
      >>> require_one_of("mode", "best", ("min", "max"))
      Traceback (most recent call last):
      ValueError: mode: expected 'min' or 'max', got 'best'.
    """
    *others, last = map(repr, choices)
    is_choice = isinstance(value, str | int | None) and value in choices
    require(is_choice, name, f"{', '.join(others)} or {last}", value, advice)


def require_instance(name: str, value: Any, wanted: Any, expected: str, advice: str = "") -> None:
    """Raises TypeError unless a value is an instance of a class; `expected` says which."""
    if not isinstance(value, wanted):
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name}: expected {expected}, got {got}. {advice}".rstrip())


def require_flags(**flags: Any) -> None:
    """Raises ValueError unless every argument is True or False."""
    for name, value in flags.items():
        require(isinstance(value, bool | np.bool_), name, "True or False", value)


def is_integer(value: Any, least: int) -> TypeGuard[int]:
    """Returns True for an integer of at least `least`; bools do not count as integers."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(whole and value >= least)


def is_positive(value: Any) -> bool:
    """Returns True for a positive, finite real number; bools do not count as numbers."""
    is_real = isinstance(value, int | float | np.integer | np.floating)
    return bool(is_real and not isinstance(value, bool) and value > 0 and math.isfinite(value))


def is_number(value: Any) -> bool:
    """Returns True for one number, which may be an array without axes."""
    return isinstance(value, _NUMBERS) and not np.ndim(value)


def require_untraced(name: str, tree: Any) -> None:
    """Raises TypeError while jax traces a function, within jit, grad or vmap.

    Args:
      name: Of an argument.
      tree: The argument; of a tree whose leaves are no tracers, jit alone is noticed.
    """
    in_jit = isinstance(jnp.asarray(0), jax.core.Tracer)  # the cheapest way to make an array
    # jax 0.10 warns of generators that it takes for leaves unless it is told to.
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Iterator))
    if in_jit or any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise TypeError(
            f"{name}: expected arrays that have values, got a call within jax.jit, grad, vmap or "
            "another transformation, which traces it. fit, run, evaluate and predict run on the "
            "host: call them outside of it. Inside, take steps by functrain.fuse(step, k), or by "
            "jax.lax.scan."
        )


_first_process: int | None = None  # the process that used JAX first


def require_not_forked() -> None:
    """Raises RuntimeError in a child that was forked after functrain had used JAX.

    JAX's threads are in the parent only, and the first program would wait for them forever.
    """
    global _first_process
    if _first_process is None:
        _first_process = os.getpid()
    elif _first_process != os.getpid():
        raise RuntimeError(
            "expected a process in which JAX can run, got a child that was forked from one which "
            "had used it: it would hang. Start processes with "
            "multiprocessing.get_context('spawn')."
        )
