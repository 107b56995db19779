"""The description of an operation that made NaN or an infinity, and of the values around it."""

import dataclasses
import itertools
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from functrain.common import _tree
from functrain.rewrites._equations import library_folders


class OutOfRange(NamedTuple):
    """Indices of a gather that are out of range: it returns NaN for them.

    Attributes:
      size: Length of the axis, such as the number of classes.
      indices: The unique indices that are out of range, after `size` was added to negative ones.
      leaf: The integers of the batch that the indices come from, such as labels, with their range;
        empty if unknown.
    """

    size: int
    indices: tuple[int, ...]
    leaf: str = ""

    def __str__(self) -> str:
        indices = [*map(str, self.indices[:5]), *(["..."] if len(self.indices) > 5 else [])]
        source = f" They come from {self.leaf}." if self.leaf else ""
        return f"Indices outside of [0, {self.size}) return NaN: {', '.join(indices)}.{source}"


@dataclasses.dataclass(frozen=True)
class NotFinite:
    """An operation that made NaN or an infinity from finite inputs.

    Attributes:
      operation: Its name in JAX, such as ``log``; ``input`` if the state or the batch holds NaN or
        an infinity.
      bad_values: The bad values of its output, such as ``NaN in 3 of 8``.
      location: The layer, if it has a name, and your source line, followed by the line of the
        library that it calls; the path of an input.
      inputs: The dtype, shape and range of each input.
      within: The loops and branches around it, the outermost first, such as
        ``scan, iteration 7``.
      reaches_output: True if an output of the step is not finite because of it.
      cause: The operation that made the infinity which led to its NaN; ``input`` if that infinity
        was in the state or the batch.
      out_of_range: For a gather, the indices that are out of range, such as labels above the
        number of classes.

    Examples:
      >>> print(NotFinite("log", "-inf in 1 of 2", "net.py:3", ("float32[2]: 0 to 1",)))
      log: -inf in 1 of 2 values
        location: net.py:3
        input: float32[2]: 0 to 1
    """

    operation: str
    bad_values: str
    location: str
    inputs: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    reaches_output: bool = True
    cause: "NotFinite | None" = None
    out_of_range: OutOfRange | None = None

    def __str__(self) -> str:
        lines = [f"{self.operation}: {self.bad_values} values"]
        if self.location:
            lines.append(f"  location: {self.location}")
        lines += [f"  within: {loop}" for loop in self.within]
        lines += [f"  input: {text}" for text in self.inputs]
        if self.out_of_range is not None:
            lines.append(f"  {self.out_of_range}")
        is_of_state = self.operation == "input" and self.location.startswith("state")
        if is_of_state and self.bad_values.startswith("NaN"):
            advice = "go back one step: pass the state before that step, and its batch."
            lines.append(f"  If an earlier step made it, {advice}")
        if not self.reaches_output:
            lines.append("  No output of the step is NaN or infinite because of these values.")
        if self.cause is not None:
            lines += ["The infinity came from", str(self.cause)]
        return "\n".join(lines)


def out_of_range(eqn: core.JaxprEqn, operand: Any, indices: Any) -> OutOfRange | None:
    """Returns the indices of a gather that are out of range, for the first axis that has some."""
    indices = np.asarray(indices)
    axes, sizes = eqn.params["dimension_numbers"].start_index_map, eqn.params["slice_sizes"]
    # A gather takes slices. One that starts after `last` would end outside of the axis.
    for column, axis in enumerate(axes):
        starts, last = indices[..., column], operand.shape[axis] - sizes[axis]
        outside = np.unique(starts[(starts < 0) | (starts > last)])
        if outside.size:
            return OutOfRange(operand.shape[axis], tuple(outside.tolist()))
    return None


def has_nan(x: Any) -> bool:
    """Returns True if a value holds NaN."""
    return count_nan([x]) > 0


def has_infinity(x: Any) -> bool:
    """Returns True if a value holds an infinity."""
    return _is_inexact(x) and bool(np.isinf(_to_float64(x)).any())


def count_nan(values: Iterable[Any]) -> int:
    """Returns how many elements of some values are NaN."""
    return sum(int(np.isnan(_to_float64(x)).sum()) for x in values if _is_inexact(x))


def _is_inexact(x: Any) -> bool:
    # Leaves of the state and the batch may be Python numbers.
    return jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.inexact)


def _to_float64(x: Any) -> np.ndarray[Any, Any]:
    """Returns an array in float64 or complex128, whatever its precision."""
    return np.asarray(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)


def count_bad(x: Any, *, is_nan: bool) -> str:
    """Returns text such as "NaN in 3 of 8"."""
    array = _to_float64(x)
    bad = np.isnan(array) if is_nan else np.isinf(array)
    infinity = "-inf" if (array[bad].real < 0).all() else "inf"
    return f"{'NaN' if is_nan else infinity} in {bad.sum():,} of {array.size:,}"


def describe_range(x: Any) -> str:
    """Returns the dtype and shape of a leaf, and the range of an array of numbers."""
    spec = _tree.spec(x)
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.number) or not x.size:
        return spec
    # Complex numbers have no order: show the range of their absolute values.
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        spec, x = f"|{spec}|", jnp.abs(x)
    array = _to_float64(x).ravel()
    # fmin and fmax ignore NaN.
    low, high = f"{np.fmin.reduce(array):.6g}", f"{np.fmax.reduce(array):.6g}"
    return f"{spec}: {low}" + (f" to {high}" if high != low else "")


def source_location(eqn: core.JaxprEqn) -> str:
    """Returns the layer, the user's source line, and the line of the library that it calls."""
    frames = source_info_util.summarize(eqn.source_info, num_frames=_MAX_DEPTH).splitlines()[::-1]
    # The innermost frame comes first. Beyond explain_nan are the frames of its caller.
    frames = list(itertools.takewhile(lambda frame: not frame.startswith(_EXPLAIN_NAN), frames))
    user_frames = [frame for frame in frames if not frame.startswith(library_folders())]
    # A dict, so that a line that is both of them is shown once.
    lines = dict.fromkeys([*user_frames[:1], *frames[:1]])
    source = ", in ".join(frame.rpartition("/")[2] for frame in lines)
    return "  ".join(filter(None, [str(eqn.source_info.name_stack), source]))


# The most frames of the call stack that are read. A step of a deep model has some tens.
_MAX_DEPTH = 200
_EXPLAIN_NAN = os.path.join(os.path.dirname(__file__), "_explain_nan.py")
