"""What is known of a moment by name: numbers; of a population `[N]`, one for each member."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._checks import is_number
from functrain.common._types import PyTree


def is_loggable(x: Any, of_members: bool) -> bool:
    """Whether something is a number, or of a population one for each member."""
    return is_number(x) or (of_members and np.ndim(x) == 1 and np.asarray(x).dtype.kind in "biuf")


def to_floats(x: Any) -> Any:
    """Returns a number as a float, numbers of members as `f64[N]` that share no memory."""
    return np.array(x, np.float64) if np.ndim(x) else float(x)


def to_values(values: PyTree) -> dict[str, Any]:
    """Fetches a tree of scalars as floats, of `[N]` of a population as arrays, by their paths."""
    host = jax.device_get(values)
    return {path: to_floats(value) for path, value in _tree.leaves_with_path(host)}


def split_members(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns numbers under names of their own: a member's under ``name/i``.

    Examples:
      >>> split_members({"loss": np.array([0.5, 0.25]), "seconds": 3})
      {'loss/0': 0.5, 'loss/1': 0.25, 'seconds': 3.0}
    """
    found: dict[str, float] = {}
    for name, x in values.items():
        if np.ndim(x):
            found |= {f"{name}/{i}": float(y) for i, y in enumerate(x)}
        else:
            found[name] = float(x)
    return found


def format_value(x: Any) -> str:
    """Returns a number in four digits, numbers of members as their median and range.

    Examples:
      >>> format_value(0.123456), format_value(np.array([1.0, 2.0, np.nan, 4.0]))
      ('0.1235', '2 (1 to 4)')
    """
    if not np.ndim(x):
        return f"{x:.4g}"
    there = np.asarray(x)[~np.isnan(x)]
    if not there.size:
        return "nan"
    return f"{np.median(there):.4g} ({there.min():.4g} to {there.max():.4g})"
