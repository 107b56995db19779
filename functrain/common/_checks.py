"""What arguments are asked."""

from typing import Any, TypeGuard

import jax
import numpy as np

_NUMBERS = bool | int | float | np.number | np.bool_ | np.ndarray | jax.Array


def is_whole(value: Any, least: int) -> TypeGuard[int]:
    """Whether a value is a whole number, and not too small; a flag is none."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(whole and value >= least)


def is_number(value: Any) -> bool:
    """Whether a value is one number, an array of no axes included."""
    return isinstance(value, _NUMBERS) and not np.ndim(value)
