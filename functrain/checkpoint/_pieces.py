"""How a leaf is made of arrays in a file: which parts, in which order of axes, and joined."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._layout import (
    Layout,
    Shape,
    file_shape_of,
    joined_shape,
    parse_layout,
)
from functrain.checkpoint._leaves import Index
from functrain.checkpoint._manifest import parse_spec
from functrain.checkpoint._rename import Rename, Source
from functrain.common import _tree
from functrain.common._checks import require_no_problems

Read = Callable[[str, Index | None], np.ndarray]  # given a name and an index, returns that part
_FLOAT = re.compile(r"^b?float\w+")  # of a spec, such as bfloat16[8, 3]


class Piece(NamedTuple):
    """How a leaf is made of arrays in a file.

    Attributes:
      names: The arrays that are joined.
      shapes: The shapes that they give to the leaf, one after the other at `axis`.
      layout: Their axes; None if they are those of the leaf.
      axis: The axis of the leaf.
      part: The part of an array that is read; None for all of it.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...] = ()
    layout: Layout | None = None
    axis: int = 0
    part: Index | None = None

    def read(self, read: Read, index: Index | None = None) -> np.ndarray:
        """Returns the part of the leaf at an index."""
        layout, name = self.layout, self.names[0]
        is_whole = len(self.names) == 1 and self.part is None
        if is_whole and layout is None:
            return read(name, index)
        if is_whole and layout is not None and layout.is_permutation:
            # Only the requested part, in the order of the file.
            file_order = [layout.axes.index(group[0]) for group in layout.groups]
            array = read(name, None if index is None else tuple(index[i] for i in file_order))
            return array.transpose(np.argsort(file_order))
        arrays = [read(name, self.part) for name in self.names]
        if layout is not None:
            arrays = [layout.to_state(*pair) for pair in zip(arrays, self.shapes, strict=True)]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, self.axis)
        return whole if index is None else whole[index]


def make_pieces(
    file: str,
    sources: Mapping[str, Source],
    specs: Mapping[str, str],
    leaves: Mapping[str, Any],
    merged: Mapping[str, str],
    cast: bool,
) -> dict[str, Piece]:
    """Returns how the leaves are made; no array is read.

    Args:
      file: The path of the file.
      sources: The sources of the leaves to make, by path.
      specs: Dtype and shape of each array in the file.
      leaves: All leaves of the state.
      merged: Of each leaf, the path in the model without `freeze` and `lora`.
      cast: True allows other floating-point dtypes.

    Raises:
      CheckpointMismatchError: A leaf has another shape or dtype.
    """
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    shapes |= {merged_path: shapes[path] for path, merged_path in merged.items()}
    pieces: dict[str, Piece] = {}
    piece_specs: dict[str, str] = {}
    for path, source in sources.items():
        array_specs = [specs[name] for name in source.names]
        piece, piece_specs[path] = _make_piece(source, array_specs, leaves[path], shapes)
        if piece is not None:
            pieces[path] = piece
    _require_same_specs(file, piece_specs, leaves, cast)
    return pieces


def _make_piece(
    source: Source, array_specs: Sequence[str], leaf: Any, shapes: Mapping[str, Shape]
) -> tuple[Piece | None, str]:
    """Returns how a leaf is made, and its spec; None and a description if the shapes do not fit."""
    if not source.is_transformed or source.rule is None:
        return Piece(source.names), array_specs[0]
    # A random key has no dtype that NumPy could transpose.
    if not any(spec.startswith("key<") for spec in array_specs):
        dtypes, array_shapes = zip(*map(parse_spec, array_specs), strict=True)
        piece = _transformed_piece(source, source.rule, leaf.shape, shapes, array_shapes)
        if piece is not None:
            return piece, _tree.format_spec(_most_different(dtypes, leaf.dtype), leaf.shape)
    return None, f"{', '.join(array_specs)} by {source.rule}"


def _transformed_piece(
    source: Source,
    rule: Rename,
    shape: Shape,
    shapes: Mapping[str, Shape],
    array_shapes: Sequence[Shape],
) -> Piece | None:
    """Returns how a leaf is made by a rule; None if the shapes do not fit."""
    if len(source.names) > 1:
        return _joined_piece(source.names, rule, shape, array_shapes)
    if len(source.paths) > 1:
        leaf_shapes = [shapes.get(path) for path in source.paths]
        return _split_piece(source, rule, leaf_shapes, array_shapes[0])
    layout = parse_layout(rule.layout)
    fits = file_shape_of(layout, shape) == array_shapes[0]
    return Piece(source.names, (shape,), layout, rule.axis) if fits else None


def _joined_piece(
    names: tuple[str, ...], rule: Rename, shape: Shape, array_shapes: Sequence[Shape]
) -> Piece | None:
    """Returns how a leaf is joined from arrays."""
    layout = parse_layout(rule.layout)
    parts: Sequence[Shape | None] = array_shapes
    if layout is not None:
        parts = [layout.part_shape(array, shape, rule.axis) for array in array_shapes]
    if joined_shape(parts, rule.axis) != shape:
        return None
    return Piece(names, tuple(filter(None, parts)), layout, rule.axis)


def _split_piece(
    source: Source, rule: Rename, leaf_shapes: Sequence[Shape | None], array_shape: Shape
) -> Piece | None:
    """Returns how a leaf is cut out of an array that is split into leaves of these shapes."""
    layout, axis = parse_layout(rule.layout), rule.axis
    parts = [file_shape_of(layout, shape) for shape in leaf_shapes]
    if joined_shape(parts, axis) != array_shape:
        return None
    ends = [0, *itertools.accumulate(part[axis] for part in parts if part is not None)]
    cut = slice(ends[source.part], ends[source.part + 1])
    index = tuple(cut if i == axis else slice(0, size) for i, size in enumerate(array_shape))
    return Piece(source.names, (leaf_shapes[source.part] or (),), layout, axis, index)


def _most_different(dtypes: Sequence[Any], like: Any) -> Any:
    """Returns the one of the dtypes of joined arrays that is least like that of their leaf."""
    return max(dtypes, key=lambda x: (x != like, not jnp.issubdtype(x, jnp.floating)))


def _without_precision(specs: Mapping[str, str]) -> dict[str, str]:
    """Returns specs in which all floating-point dtypes are the same: ``float[8, 3]``."""
    return {path: _FLOAT.sub("float", spec) for path, spec in specs.items()}


def _require_same_specs(
    file: str, specs: Mapping[str, str], leaves: Mapping[str, Any], cast: bool
) -> None:
    """Raises CheckpointMismatchError for another shape or dtype."""
    expected = {path: _tree.strong_spec(leaves[path]) for path in specs}
    if cast:
        expected, specs = _without_precision(expected), _without_precision(specs)
    require_no_problems(
        file,
        _tree.spec_differences(expected, dict(specs)),
        "the shapes and dtypes of the state",
        "Nothing was taken. For another order of axes: rules of functrain.Rename. To convert "
        "floating-point numbers: cast=True. To leave leaves unchanged: skip= their paths.",
        error=CheckpointMismatchError,
    )
