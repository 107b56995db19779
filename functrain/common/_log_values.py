"""The names and values of logs; in a population, a value is an array `[N]` of the members."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._checks import is_number
from functrain.common._gather import fetch_global
from functrain.common._types import PyTree


class LogName(str):
    """The base of the names of logs that are not simply averaged over an epoch.

    They are strings like any other, so a dict of logs looks the same, and keeps them in
    `jax.jit`, in copies and in nested dicts.
    """

    __slots__ = ()


class LastValue(LogName):
    """A schedule or a counter: an epoch reports its last value, since a mean says little."""

    __slots__ = ()


class SkippedInARow(LastValue):
    """A count that is above 0 if the step was skipped: its other logs do not count."""

    __slots__ = ()


class Unshown(LogName):
    """A value for logs and the history only, which progress lines leave out."""

    __slots__ = ()


class SumOfWeights(Unshown):
    """The number by which the loss of the step was divided: the weight of its logs in a mean."""

    __slots__ = ()


def name_of(path: tuple[jax.tree_util.KeyEntry, ...]) -> str:
    """Returns the name of the log at a path, such as ``g/loss``, of the type of its last key."""
    name, key = _tree.path_str(path), getattr(path[-1], "key", None) if path else None
    return type(key)(name) if isinstance(key, LogName) else name


def related(name: str, kind: type[LogName], names: Iterable[str]) -> list[str]:
    """Returns the logs of a kind in the dict of a log, or else in the next one around it."""
    of_kind: list[str] = [other for other in names if isinstance(other, kind)]
    prefix = name
    while prefix:
        prefix = prefix.rpartition("/")[0]
        in_dict = [other for other in of_kind if other.rpartition("/")[0] == prefix]
        if in_dict:
            return in_dict
    # A step may log its counts of skipped steps in a dict of their own.
    return of_kind if kind is SkippedInARow else []


def is_loggable(x: Any, is_population: bool) -> bool:
    """Returns True for a real number, and in a population also for numbers `[N]` of the members."""
    if is_number(x):
        return not np.iscomplexobj(x)
    return is_population and np.ndim(x) == 1 and np.asarray(x).dtype.kind in "biuf"


def to_floats(x: Any) -> Any:
    """Returns a number as a float, and numbers of members as a new array `f64[N]`."""
    return np.array(x, np.float64) if np.ndim(x) else float(x)


def to_values(values: PyTree) -> dict[str, Any]:
    """Fetches a tree of scalars as floats by path; numbers `[N]` of members as arrays.

    Members may be divided over processes, which then all have to call it.
    """
    host = fetch_global(values)
    return {path: to_floats(value) for path, value in _tree.leaves_with_path(host)}


def split_members(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns every number under its own name: that of member i under ``name/i``.

    Examples:
      >>> split_members({"loss": np.array([0.5, 0.25]), "seconds": 3})
      {'loss/0': 0.5, 'loss/1': 0.25, 'seconds': 3.0}
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if np.ndim(value):
            numbers |= {f"{name}/{i}": float(x) for i, x in enumerate(value)}
        else:
            numbers[name] = float(value)
    return numbers


def format_value(x: Any) -> str:
    """Returns a number with four digits, or the median and range of the members' numbers.

    Examples:
      >>> format_value(0.123456), format_value(np.array([1.0, 2.0, np.nan, 4.0]))
      ('0.1235', '2 (1 to 4)')
    """
    if not np.ndim(x):
        return f"{x:.4g}"
    # Members that have stopped report NaN.
    numbers = np.asarray(x)[~np.isnan(x)]
    if not numbers.size:
        return "nan"
    return f"{np.median(numbers):.4g} ({numbers.min():.4g} to {numbers.max():.4g})"
