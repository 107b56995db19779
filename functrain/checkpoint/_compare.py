"""Two checkpoints side by side: which leaves differ, and by how much."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from functrain.checkpoint._about import read_about
from functrain.checkpoint._leaves import path_of, root_of
from functrain.checkpoint._listing import WIDTH, table
from functrain.checkpoint._single import STATE
from functrain.checkpoint._store import blanks, read_each
from functrain.common import _repr


class Difference(NamedTuple):
    """A leaf that is not the same in two checkpoints.

    Attributes:
      name: Its path; below the name of its tree, where that is not the state.
      what: What differs, in words.
      most: The largest difference of two elements; None where there is none to tell.
    """

    name: str
    what: str
    most: float | None


def differences(first: str, second: str) -> tuple[list[Difference], int]:
    """Compares two checkpoints.

    Leaves of one digest are the same, and are not read.

    Args:
      first: The directory of a checkpoint.
      second: That of another.

    Returns:
      The leaves that differ, in the order of the first; and how many there are in all.

    Raises:
      CheckpointCorruptError: A leaf that has to be read is damaged.
    """
    abouts = read_about(first), read_about(second)
    one, two = (about["leaves"] for about in abouts)
    found = []
    for name in {**one, **two}:
        what, most = "", None
        if name not in two:
            what = f"{one[name]['spec']}, first only"
        elif name not in one:
            what = f"{two[name]['spec']}, second only"
        elif one[name]["spec"] != two[name]["spec"]:
            what = f"{one[name]['spec']} and {two[name]['spec']}"
        elif one[name] != two[name]:
            pair = (_read(d, about, name) for d, about in zip((first, second), abouts, strict=True))
            what, most = _difference(one[name]["spec"], *pair)
        if what:
            shown = path_of(name) if root_of(name) == STATE else name
            found.append(Difference(shown, what, most))
    return found, len({**one, **two})


def compared(first: str, second: str, most: int = 40) -> tuple[str, bool]:
    """Returns a report on two checkpoints, and whether they are the same."""
    found, count = differences(first, second)
    both = {"first": first, "second": second}.items()
    lines = [f"  {name:<7}{_repr.ending(path, WIDTH - 9)}" for name, path in both]
    lines += _said(read_about(first), read_about(second))
    if not found:
        return "\n".join([*lines, f"All of {count:,} leaves are the same, bit for bit."]), True
    rows = found[:most]
    amounts = ["" if x.most is None else f"{x.most:.3g}" for x in rows]
    whats = [_repr.ending(x.what, 36) for x in rows]
    room = WIDTH - 6 - max(map(len, whats)) - max(len("most"), *map(len, amounts))
    names = [_repr.ending(x.name, room) for x in rows]
    columns = [("leaf", names), ("differs", whats), ("most", amounts)]
    lines += [table(columns, left=("leaf", "differs"))]
    lines += [f"  ... and {len(found) - most:,} more"] if len(found) > most else []
    return "\n".join([*lines, f"{len(found):,} of {count:,} leaves differ."]), False


def _said(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Returns what else differs: where the runs were, what they ran on."""
    pairs = [("step", one.get("step"), two.get("step"))]
    names = {**one["run"], **two["run"]}
    pairs += [(name, one["run"].get(name), two["run"].get(name)) for name in names]
    return [f"  {name}: {a} and {b}" for name, a, b in pairs if a != b]


def _read(directory: str, about: Mapping[str, Any], name: str) -> np.ndarray:
    read = read_each(directory, about, blanks(about, [name]), lambda name, array: array)
    array: np.ndarray = read[name]
    return array


def _difference(spec: str, a: np.ndarray, b: np.ndarray) -> tuple[str, float | None]:
    """Returns in words in how many elements two arrays differ, and by how much at the most."""
    if spec.startswith("key<"):
        return f"{spec}, other keys", None
    other = _bits(a) != _bits(b)
    what = f"{np.count_nonzero(other):,} of {a.size:,} elements"
    if not jnp.issubdtype(a.dtype, jnp.number):
        return what, None
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    with np.errstate(invalid="ignore"):  # inf - inf
        gaps = np.abs(a.reshape(-1)[other].astype(wide) - b.reshape(-1)[other].astype(wide))
    return what, float(gaps.max())


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns each element's bytes as one thing, so that NaNs are equal to themselves."""
    return np.ascontiguousarray(array).reshape(-1).view(f"V{array.dtype.itemsize}")
