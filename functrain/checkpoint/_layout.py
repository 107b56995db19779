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
        return "1" not in self.axes and all(len(group) == 1 and group != ("1",) for group in groups)

    def file_shape(self, shape: Shape) -> Shape:
        """Returns the shape in the file of a leaf of some shape."""
        sizes = self._sizes(shape)
        return tuple(math.prod(sizes[name] for name in group) for group in self.groups)

    def part_shape(self, array_shape: Shape, leaf_shape: Shape, axis: int) -> Shape | None:
        """Returns the shape of an array of the file as a part of a leaf; None if it is not one.

        Parts are joined at `axis`. At all other axes, the shape has the sizes of the leaf.
        """
        if len(leaf_shape) != len(self.axes) or len(array_shape) != len(self.groups):
            return None
        part = with_size(leaf_shape, axis, self._size_of_part(array_shape, leaf_shape, axis))
        return part if file_shape_of(self, part) == array_shape else None

    def _size_of_part(self, array_shape: Shape, leaf_shape: Shape, axis: int) -> int:
        """Returns the size that is left for an axis in the group that it is in."""
        sizes, name = self._sizes(leaf_shape), self.axes[axis]
        for group, group_size in zip(self.groups, array_shape, strict=True):
            if name in group:
                others = math.prod(sizes[other] for other in group if other != name)
                return group_size // max(1, others)
        return 1  # an axis of size 1, which the file does not have

    def _sizes(self, shape: Shape) -> dict[str, int]:
        """Returns the sizes of the axes by name in a leaf of some shape."""
        return dict(zip(self.axes, shape, strict=True)) | {"1": 1}

    def to_state(self, array: np.ndarray, shape: Shape) -> np.ndarray:
        """Returns an array of a file as a leaf of a shape."""
        sizes, names = self._sizes(shape), self._names()
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
    matches = re.findall(r"\(([^()]*)\)|([^\s()]+)", left)
    groups = [(in_parentheses or name).split() for in_parentheses, name in matches]
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


def joined_shape(shapes: Sequence[Shape | None], axis: int) -> Shape | None:
    """Returns the shape of arrays that are joined at an axis; None if they cannot be."""
    with_axis = [shape for shape in shapes if shape is not None and axis < len(shape)]
    without_size = {with_size(shape, axis, 0) for shape in with_axis}
    if len(with_axis) < len(shapes) or len(without_size) > 1:
        return None
    return with_size(with_axis[0], axis, sum(shape[axis] for shape in with_axis))


def with_size(shape: Shape, axis: int, size: int) -> Shape:
    """Returns a shape with another size at an axis, if it has that axis."""
    return (*shape[:axis], size, *shape[axis + 1 :]) if axis < len(shape) else shape
