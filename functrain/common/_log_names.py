"""Names of logs whose type tells a loop what the log is, whatever the name itself."""

from collections.abc import Iterable, Sequence

import jax

from functrain.common._tree import path_str


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


class SumOfWeights(LogName):
    """The number by which the loss of the step was divided: the weight of its logs in a mean."""

    __slots__ = ()


def name_of(path: tuple[jax.tree_util.KeyEntry, ...]) -> str:
    """Returns the name of the log at a path, such as ``g/loss``, of the type of its last key."""
    name, key = path_str(path), getattr(path[-1], "key", None) if path else None
    return type(key)(name) if isinstance(key, LogName) else name


def nearest(name: str, names: Sequence[str]) -> list[str]:
    """Returns those of `names` that are in the dict of a log, or else in the next one around it."""
    while name:
        name = name.rpartition("/")[0]
        in_dict = [other for other in names if other.rpartition("/")[0] == name]
        if in_dict:
            return in_dict
    return []


def skip_counts(name: str, names: Iterable[str]) -> list[str]:
    """Returns the counts of skipped steps, among the names of all logs, that concern a log."""
    counts: list[str] = [other for other in names if isinstance(other, SkippedInARow)]
    # A step may log them in a dict of their own.
    return nearest(name, counts) or counts
