"""Recognizes data: summaries of batches, and how two of them differ."""

from typing import Any, TypeAlias

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree

Summary: TypeAlias = dict[str, dict[str, Any]]
"""By path of the leaf: its `spec`, and some of its `numbers`."""

# Numbers kept of each leaf: enough to tell orders and seeds apart, few enough to read in a file.
NUMBERS = 24


def summary(batch: PyTree) -> Summary:
    """Returns the spec of each leaf, and some of its numbers, evenly spaced.

    Examples:
      >>> summary({"x": np.arange(3, dtype=np.int32)})
      {'x': {'spec': 'int32[3]', 'numbers': [0.0, 1.0, 2.0]}}
    """
    return {
        path: {"spec": _tree.strong_spec(leaf), "numbers": _sample(leaf)}
        for path, leaf in _tree.leaves_with_path(batch)
    }


def differences(
    saved: Summary, now: Summary, which: str, *, compares_numbers: bool = True
) -> list[str]:
    """Returns a line for each leaf whose spec differs, or else whose numbers do.

    Args:
      saved: The summary of a batch in a checkpoint.
      now: The summary of the same batch now.
      which: Which batch of the data it is, for the lines.
      compares_numbers: Whether to compare the numbers too.
    """
    lines = []
    for path in {**saved, **now}:
        specs = [str(s[path]["spec"]) if path in s else "none" for s in (saved, now)]
        if specs[0] != specs[1]:
            lines.append(f"{path} of the {which} batch: saved with {specs[0]}, now {specs[1]}")
    if lines or not compares_numbers:
        return lines
    for path in saved:
        numbers = saved[path]["numbers"], now[path]["numbers"]
        if not _are_close(*numbers):
            few = [", ".join(f"{x:.4g}" for x in some[:4]) for some in numbers]
            lines.append(
                f"{path} of the {which} batch: saved with {few[0]}, ..., now {few[1]}, ..."
            )
    return lines


def _sample(leaf: Any) -> list[float]:
    """Returns some of the numbers of a leaf, evenly spaced."""
    if isinstance(leaf, jax.Array) and _tree.is_key(leaf):
        leaf = jax.random.key_data(leaf)
    flat = np.asarray(leaf).reshape(-1)
    if not flat.size:
        return []
    numbers = flat[np.unique(np.linspace(0, flat.size - 1, NUMBERS).astype(int))]
    if numbers.dtype.kind == "c":
        numbers = np.abs(numbers)
    return [float(x) for x in numbers]


def _are_close(saved: list[float], now: list[float]) -> bool:
    """Returns True if numbers are those that were saved, as another machine may round them.

    A loader may compute its batches, so a hundredth of the numbers' range is no difference.
    """
    if not saved:
        return True
    finite = [x for x in saved if np.isfinite(x)] or [0.0]
    tolerance = 0.01 * float(np.ptp(finite)) + 1e-6 * float(np.max(np.abs(finite)))
    return bool(np.allclose(saved, now, rtol=0.0, atol=tolerance, equal_nan=True))
