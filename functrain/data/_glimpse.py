"""A batch in a few words and numbers, to tell later whether another one is the same."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree

Glimpse: TypeAlias = dict[str, dict[str, Any]]
"""By path of the leaf: its `spec`, and some of its `numbers`."""

# Of each leaf: enough to tell orders and seeds apart, few enough to be read in a file.
NUMBERS = 24


def glimpse(batch: PyTree) -> Glimpse:
    """Returns the spec of each leaf, and some of its numbers, evenly spaced.

    Examples:
      >>> glimpse({"x": np.arange(3, dtype=np.int32)})
      {'x': {'spec': 'int32[3]', 'numbers': [0.0, 1.0, 2.0]}}
    """
    return {
        path: {"spec": _tree.strong_spec(leaf), "numbers": _some(leaf)}
        for path, leaf in _tree.leaves_with_path(batch)
    }


def compared(saved: Glimpse, now: Glimpse, which: str, *, numbers: bool = True) -> list[str]:
    """Says where two batches differ: in a spec, else in their numbers.

    Another machine may round otherwise what a loader computes: a hundredth of how far the numbers
    are apart is no difference.

    Args:
      saved: A batch as it was.
      now: As it is.
      which: Which batch of the data, for messages.
      numbers: Whether to look at the numbers, too.
    """
    paths = {**saved, **now}
    found = [
        f"{path} of the {which} batch: saved with {_spec(saved, path)}, now {_spec(now, path)}"
        for path in paths
        if _spec(saved, path) != _spec(now, path)
    ]
    if found or not numbers:
        return found
    return [
        f"{path} of the {which} batch: saved with {_few(saved, path)}, now {_few(now, path)}"
        for path in paths
        if not _near(saved[path]["numbers"], now[path]["numbers"])
    ]


def _spec(seen: Glimpse, path: str) -> str:
    return str(seen[path]["spec"]) if path in seen else "none"


def _few(seen: Glimpse, path: str) -> str:
    return ", ".join(f"{x:.4g}" for x in seen[path]["numbers"][:4]) + ", ..."


def _some(leaf: Any) -> list[float]:
    if isinstance(leaf, jax.Array) and _tree.is_key(leaf):
        leaf = jax.random.key_data(leaf)
    flat = np.asarray(leaf).reshape(-1)
    if not flat.size:
        return []
    places = np.unique(np.linspace(0, flat.size - 1, NUMBERS).astype(int))
    found = flat[places]
    real: Iterable[Any] = np.abs(found) if found.dtype.kind == "c" else found
    return [float(x) for x in real]


def _near(saved: list[float], now: list[float]) -> bool:
    if not saved:
        return True
    finite = [x for x in saved if np.isfinite(x)] or [0.0]
    apart = 0.01 * float(np.ptp(finite)) + 1e-6 * float(np.max(np.abs(finite)))
    return bool(np.allclose(saved, now, rtol=0.0, atol=apart, equal_nan=True))
