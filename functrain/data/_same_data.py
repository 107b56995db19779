"""Compares the data of a resumed run with those of the saved one, by summaries of batches."""

import math
from typing import Any, TypeAlias

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree

Summary: TypeAlias = dict[str, dict[str, Any]]
"""For each leaf, by its path: its `spec`, and a sample of its `numbers`."""

# The size of the sample of each leaf: large enough to distinguish orders and seeds, small enough to
# be read in a file.
SAMPLE_SIZE = 24


def summary(batch: PyTree) -> Summary:
    """Returns the spec of each leaf, and an evenly spaced sample of its numbers.

    Examples:
      >>> summary({"x": np.arange(3, dtype=np.int32)})
      {'x': {'spec': 'int32[3]', 'numbers': [0.0, 1.0, 2.0]}}
    """
    leaves: Summary = {}
    for path, leaf in _tree.leaves_with_path(batch):
        leaves[path] = {"spec": _tree.strong_spec(leaf), "numbers": _sample(leaf)}
    return leaves


def differences(
    saved: Summary, current: Summary, place: str, *, compares_numbers: bool = True
) -> list[str]:
    """Returns a line for each leaf whose specs or numbers differ.

    Args:
      saved: The summary of a batch, or of all data, in a checkpoint.
      current: The summary of the same in this run.
      place: Names it in the lines, such as "the first batch".
      compares_numbers: True to compare the numbers too.
    """
    lines = []
    absent = {"spec": "none", "numbers": []}
    for path in {**saved, **current}:
        old, new = saved.get(path, absent), current.get(path, absent)
        if old["spec"] != new["spec"]:
            lines.append(f"{path} of {place}: saved with {old['spec']}, now {new['spec']}")
        elif compares_numbers:
            # The first pair is enough to see that these are other data.
            for i in np.flatnonzero(~_are_close(old["numbers"], new["numbers"]))[:1]:
                pair = f"saved with {old['numbers'][i]:.4g}, now {new['numbers'][i]:.4g}"
                lines.append(f"{path} of {place}: {pair}")
    return lines


def _sample(leaf: Any) -> list[float]:
    """Returns an evenly spaced sample of the numbers of a leaf."""
    if isinstance(leaf, jax.Array) and _tree.is_key(leaf):
        leaf = jax.random.key_data(leaf)
    leaf = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
    size = math.prod(leaf.shape)
    if not size:
        return []
    positions = np.unique(np.linspace(0, size - 1, SAMPLE_SIZE).astype(int))
    # Not all of the array: it may be on disk, on a device, or overlapping windows of another one.
    numbers = np.asarray(leaf[np.unravel_index(positions, leaf.shape)] if leaf.ndim else [leaf])
    if numbers.dtype.kind == "c":
        numbers = np.abs(numbers)
    # Python floats, because the checkpoint keeps them as JSON.
    return list(map(float, numbers))


def _are_close(saved: list[float], current: list[float]) -> np.ndarray:
    """Returns True where numbers equal the saved ones, up to the rounding of another machine."""
    finite = list(filter(np.isfinite, saved)) or [0.0]
    # A loader may compute its batches, so a hundredth of the range of the numbers is tolerated.
    # The second term is for numbers that are all equal, whose range is 0.
    tolerance = 0.01 * float(np.ptp(finite)) + 1e-6 * float(np.max(np.abs(finite)))
    return np.isclose(saved, current, rtol=0.0, atol=tolerance, equal_nan=True)
