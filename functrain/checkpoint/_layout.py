"""Layouts: the order of the axes of an array in a file and in a state."""

import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from functrain.common._checks import require

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """The axes of an array: in a file, in groups that are one axis each, and in a state."""

    groups: tuple[tuple[str, ...], ...]
    axes: tuple[str, ...]

    @property
    def is_permutation(self) -> bool:
        """Returns True if only the order of the axes differs."""
        groups = self.groups
        return "1" not in self.axes and all(len(x) == 1 and x != ("1",) for x in groups)

    def file_shape(self, shape: Shape) -> Shape:
        """Returns the shape in the file of a leaf of some shape."""
        sizes = dict(zip(self.axes, shape, strict=True)) | {"1": 1}
        return tuple(math.prod(sizes[name] for name in group) for group in self.groups)

    def to_state(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns an array of a file as a leaf of a shape."""
        sizes, names = dict(zip(self.axes, shape, strict=True)), self._names()
        order = [names.index(name) for name in self.axes if name != "1"]
        divided = array.reshape([sizes[name] for name in names])
        return divided.transpose(order).reshape(shape)

    def to_file(self, leaf: np.ndarray) -> np.ndarray:
        """Returns a leaf as an array of a file."""
        axes = [name for name in self.axes if name != "1"]
        sizes = [n for name, n in zip(self.axes, leaf.shape, strict=True) if name != "1"]
        ordered = leaf.reshape(sizes).transpose([axes.index(name) for name in self._names()])
        return ordered.reshape(self.file_shape(leaf.shape))

    def _names(self) -> list[str]:
        return [name for name in itertools.chain(*self.groups) if name != "1"]


@functools.cache
def parse_layout(layout: str) -> Layout | None:
    """Parses a layout such as ``(h d) i -> i h d``; "" is None. Raises ValueError."""
    if not layout:
        return None
    left, arrow, right = layout.partition("->")
    groups = [(a or b).split() for a, b in re.findall(r"\(([^()]*)\)|([^\s()]+)", left)]
    is_closed = not set("()") & set(re.sub(r"\([^()]*\)", "", left))
    axes = right.split()
    names = [name for name in itertools.chain(*groups) if name != "1"]
    is_same = sorted(names) == sorted(name for name in axes if name != "1")
    is_valid = arrow and is_same and is_closed and len(set(names)) == len(names)
    expected = "axes in the file and the same in the state, such as 'o i -> i o'"
    require(is_valid, "layout", expected, layout, "Only those in the file can have parentheses.")
    return Layout(tuple(map(tuple, groups)), tuple(axes))


def file_shape_of(layout: Layout | None, shape: Shape | None) -> Shape | None:
    """Returns the shape in the file of a leaf; None if the leaf has other axes than the layout."""
    if layout is None or shape is None:
        return shape
    has_axes = len(shape) == len(layout.axes)
    ones = {n for name, n in zip(layout.axes, shape, strict=False) if name == "1"}
    return layout.file_shape(shape) if has_axes and ones <= {1} else None


def joined(shapes: Sequence[Shape | None], axis: int) -> Shape | None:
    """Returns the shape of arrays that are joined at an axis; None if they cannot be."""
    known = [shape for shape in shapes if shape is not None and axis < len(shape)]
    others = {with_size(shape, axis, 0) for shape in known}
    if len(known) < len(shapes) or len(others) > 1:
        return None
    return with_size(known[0], axis, sum(shape[axis] for shape in known))


def with_size(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :]) if axis < len(shape) else shape
