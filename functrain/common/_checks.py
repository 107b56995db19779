"""What arguments are asked."""

import math
from collections.abc import Iterator
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

_NUMBERS = bool | int | float | np.number | np.bool_ | np.ndarray | jax.Array


def is_whole(value: Any, least: int) -> TypeGuard[int]:
    """Whether a value is a whole number, and not too small; a flag is none."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(whole and value >= least)


def is_positive(value: Any) -> bool:
    """Returns True for a positive, finite real number; bools do not count as numbers."""
    is_real = isinstance(value, int | float | np.integer | np.floating)
    return bool(is_real and not isinstance(value, bool) and value > 0 and math.isfinite(value))


def require_flags(**flags: Any) -> None:
    """Raises ValueError unless every argument is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{name}: expected True or False, got {value!r}.")


def require_untraced(name: str, tree: Any) -> None:
    """Raises TypeError while jax traces a function, within jit, grad or vmap.

    Args:
      name: Of an argument.
      tree: The argument; of a tree whose leaves are no tracers, jit alone is noticed.
    """
    in_jit = isinstance(jnp.zeros(()), jax.core.Tracer)
    # jax 0.10 warns of generators that it takes for leaves unless it is told to.
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Iterator))
    if in_jit or any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise TypeError(
            f"{name}: expected arrays that have values, got a call within jax.jit, grad, vmap or "
            "another transformation, which traces it. fit, run, evaluate and predict run on the "
            "host: call them outside of it. Inside, take steps by functrain.fuse(step, k), or by "
            "jax.lax.scan."
        )


def is_number(value: Any) -> bool:
    """Whether a value is one number, an array of no axes included."""
    return isinstance(value, _NUMBERS) and not np.ndim(value)
