"""What arguments are asked."""

from typing import Any, TypeGuard

import numpy as np


def is_whole(value: Any, least: int) -> TypeGuard[int]:
    """Whether a value is a whole number, and not too small; a flag is none."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(whole and value >= least)
