"""Rules by which arrays in the files of other programs are leaves of a state, and back."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._layout import (
    Layout,
    Shape,
    file_shape_of,
    joined,
    parse_layout,
    with_size,
)
from functrain.checkpoint._leaves import Index
from functrain.common._checks import (
    is_integer,
    require,
    require_integer,
    require_no_problems,
)

Read = Callable[[str, Index | None], np.ndarray]  # given a name and an index, returns that part
_STARS = re.compile(r"(\*\*?)")


@dataclasses.dataclass(frozen=True)
class Rename:
    """A rule by which arrays in a file are leaves of a state: their names and the order of axes.

    `functrain.warm_start` reads by such rules, and `functrain.export.params` writes by the same.

    Attributes:
      file: The name of an array in the file. Several names stand for one array, which is joined
        from theirs. `*` stands for one part of a name, between dots or slashes, and `**` for one
        or more, with the dots or slashes between them.
      state: The path of the leaf in the state, such as ``params/head/kernel``. An array is split
        into several. The stars stand for what those in `file` stand for, in their order.
      layout: The axes in the file and in the state, as einops writes them: ``"o i -> i o"``
        transposes, and ``"(h d) i -> i h d"`` also divides the first axis, into sizes that follow
        from the leaf. 1 is an axis of this size. By default they are equal.
      axis: The axis of the leaf at which arrays are joined, or that of the array at which it is
        split.
      parts: The sizes at that axis of the arrays that are joined, to split them again in an export.
        By default they are equal.

    Raises:
      TypeError: A name is not a text.
      ValueError: The stars of the names differ in number, there are several names on both sides, a
        layout does not have the same axes on both sides, or `axis` or `parts` do not fit it.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, tempfile
      >>> rules = [
      ...     Rename("layers.*.weight", "params/layer_*/kernel", "o i -> i o"),
      ...     Rename("layers.*.bias", "params/layer_*/bias"),
      ... ]
      >>> state = {"params": {"layer_0": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ft.export.params(f"{folder}/net.safetensors", state, rename=rules)
      ...     warm = ft.warm_start(state, f"{folder}/net.safetensors", rename=rules)
      >>> warm.loaded["params/layer_0/kernel"], warm.transformed
      ('layers.0.weight', ('params/layer_0/kernel',))
    """

    file: str | Sequence[str]
    state: str | Sequence[str]
    layout: str = ""
    axis: int = 0
    parts: Sequence[int] | None = None

    def __post_init__(self) -> None:
        names = (*self.files, *self.states)
        are_texts = all(isinstance(name, str) for name in names)
        require(are_texts, "Rename", "names that are texts", self, error=TypeError)
        expected = "one name, of the array in the file or of the leaf in the state"
        require(min(len(self.files), len(self.states)) == 1, "Rename", expected, self)
        are_different = all(len(set(x)) == len(x) for x in (self.files, self.states))
        require(are_different, "Rename", "names that differ", self)
        stars = {len(_STARS.findall(name)) for name in names}
        require(len(stars) == 1, "Rename", "as many stars in each name", self)
        self._require_axis(parse_layout(self.layout))

    def _require_axis(self, layout: Layout | None) -> None:
        """Raises ValueError for an axis that is none of the layout, or parts of other names."""
        require_integer("axis", self.axis, 0)
        if layout is not None and len(self.files) + len(self.states) > 2:
            axes = layout.axes if len(self.files) > 1 else layout.groups
            expected = f"one of the {len(axes)} axes of {self.layout!r}"
            require(self.axis < len(axes), "axis", expected, self.axis)
        parts = (0,) * len(self.files) if self.parts is None else self.parts
        are_sizes = len(parts) == len(self.files) and all(is_integer(x, 0) for x in parts)
        require(are_sizes, "parts", "a size for each name in the file", self.parts)

    @property
    def files(self) -> tuple[str, ...]:
        """Returns the names in the file."""
        return (self.file,) if isinstance(self.file, str) else tuple(self.file)

    @property
    def states(self) -> tuple[str, ...]:
        """Returns the paths in the state."""
        return (self.state,) if isinstance(self.state, str) else tuple(self.state)


class Source(NamedTuple):
    """Where a leaf is in a file.

    Attributes:
      names: The arrays that it is made of.
      rule: The rule by which it is made; None if it is the array itself.
      paths: The leaves that the array is split into.
      part: The number of this leaf among them.
    """

    names: tuple[str, ...]
    rule: Rename | None = None
    paths: tuple[str, ...] = ()
    part: int = 0

    @property
    def is_transformed(self) -> bool:
        """Returns True if the leaf is not the array as it is."""
        rule = self.rule
        return rule is not None and bool(rule.layout or len(self.names) + len(self.paths) > 2)


def find_sources(
    file: str, names: Collection[str], rename: Callable[[str], str] | Sequence[Rename] | None
) -> dict[str, Source]:
    """Returns the sources of leaves by their paths in the state.

    Raises:
      CheckpointMismatchError: The file has some of the arrays that a rule joins, but not all.
      ValueError: A leaf has two sources.
    """
    found: dict[str, Source] = {}
    if rename is None or callable(rename):
        to_path = rename or str  # each name as it is
        pairs: Iterable[tuple[str, Source]] = ((to_path(x), Source((x,))) for x in names)
    else:
        rules = require_rules(rename)
        pairs = itertools.chain(*(_sources_of(rule, file, names) for rule in rules))
    for path, source in pairs:
        other = found.get(path, source)
        expected = "a path that no other leaf is renamed to"
        advice = f"{file} has {other.names[0]!r}, which is renamed to it, too."
        require(path not in found, f"rename({source.names[0]!r})", expected, path, advice)
        found[path] = source
    return found


def require_rules(rename: Any) -> Sequence[Rename]:
    """Returns the rules of an argument; raises TypeError for anything else."""
    is_sequence = isinstance(rename, Sequence) and all(isinstance(x, Rename) for x in rename)
    require(is_sequence, "rename", "a list of rules, ft.Rename(...)", rename, error=TypeError)
    rules: Sequence[Rename] = rename
    return rules


def _sources_of(rule: Rename, file: str, names: Collection[str]) -> Iterator[tuple[str, Source]]:
    first = _regex(rule.files[0])
    for match in filter(None, map(first.fullmatch, names)):
        joined = tuple(_fill(name, match.groups()) for name in rule.files)
        missing = [name for name in joined if name not in names]
        expected = f"all of {', '.join(joined)}, which are one leaf"
        require_no_problems(file, missing, expected, error=CheckpointMismatchError)
        paths = tuple(_fill(path, match.groups()) for path in rule.states)
        for part, path in enumerate(paths):
            yield path, Source(joined, rule, paths, part)


def _regex(pattern: str) -> re.Pattern[str]:
    parts = {"*": "([^./]+?)", "**": "(.+?)"}
    text = "".join(parts.get(x) or re.escape(x) for x in _STARS.split(pattern))
    return re.compile(text, re.DOTALL)


def _fill(pattern: str, found: Sequence[str]) -> str:
    values = iter(found)
    return _STARS.sub(lambda _: next(values), pattern)


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
    shapes: tuple[Shape, ...]
    layout: Layout | None
    axis: int
    part: Index | None

    def read(self, read: Read, index: Index | None = None) -> np.ndarray:
        """Returns the part of the leaf at an index."""
        layout, name = self.layout, self.names[0]
        is_whole = len(self.names) == 1 and self.part is None
        if is_whole and layout is None:
            return read(name, index)
        if is_whole and layout is not None and layout.is_permutation:
            # Only the part that is asked for, in the order of the file.
            places = [layout.axes.index(group[0]) for group in layout.groups]
            array = read(name, None if index is None else tuple(index[i] for i in places))
            return array.transpose(np.argsort(places))
        arrays = [read(name, self.part) for name in self.names]
        if layout is not None:
            arrays = [layout.to_state(*pair) for pair in zip(arrays, self.shapes, strict=True)]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, self.axis)
        return whole if index is None else whole[index]


def make_piece(
    source: Source, shape: Shape, shapes: Mapping[str, Shape], in_file: Sequence[Shape]
) -> Piece | None:
    """Returns how a leaf is made; None if the shapes do not fit.

    Args:
      source: Where the leaf is.
      shape: The shape of the leaf.
      shapes: The shapes of all leaves, by path.
      in_file: The shapes of its arrays.
    """
    rule = source.rule
    if rule is None or not in_file:
        return None
    if len(source.names) > 1:
        return _piece_of_several(source.names, rule, shape, in_file)
    if len(source.paths) > 1:
        return _piece_of_part(source, rule, [shapes.get(path) for path in source.paths], in_file[0])
    layout = parse_layout(rule.layout)
    fits = file_shape_of(layout, shape) == in_file[0]
    return Piece(source.names, (shape,), layout, rule.axis, None) if fits else None


def _piece_of_several(
    names: tuple[str, ...], rule: Rename, shape: Shape, in_file: Sequence[Shape]
) -> Piece | None:
    """Returns how a leaf is joined from arrays."""
    layout = parse_layout(rule.layout)
    parts = [_part_shape(layout, shape, rule.axis, each) for each in in_file]
    if joined(parts, rule.axis) != shape:
        return None
    return Piece(names, tuple(filter(None, parts)), layout, rule.axis, None)


def _piece_of_part(
    source: Source, rule: Rename, shapes: Sequence[Shape | None], in_file: Shape
) -> Piece | None:
    """Returns how a leaf is cut out of an array, that leaves of these shapes are parts of."""
    layout, axis = parse_layout(rule.layout), rule.axis
    sizes = [file_shape_of(layout, shape) for shape in shapes]
    if joined(sizes, axis) != in_file:
        return None
    ends = [0, *itertools.accumulate(size[axis] for size in sizes if size is not None)]
    cut = slice(ends[source.part], ends[source.part + 1])
    index = tuple(cut if i == axis else slice(0, n) for i, n in enumerate(in_file))
    shape = shapes[source.part] or ()
    return Piece(source.names, (shape,), layout, axis, index)


def _part_shape(layout: Layout | None, shape: Shape, axis: int, in_file: Shape) -> Shape | None:
    """Returns the shape that an array has as a part of a leaf, whose size at an axis is its own."""
    of_one = file_shape_of(layout, with_size(shape, axis, 1))
    if layout is None or of_one is None or len(of_one) != len(in_file):
        return in_file if layout is None else None
    ratios = [have // max(1, n) for have, n in zip(in_file, of_one, strict=True)]
    group = next((i for i, names in enumerate(layout.groups) if layout.axes[axis] in names), None)
    part = with_size(shape, axis, 1 if group is None else ratios[group])
    return part if layout.file_shape(part) == in_file else None


class Target(NamedTuple):
    """Leaves that are one array in a file, or several, and the rule for them."""

    rule: Rename
    names: tuple[str, ...]
    paths: tuple[str, ...]

    def fits(self, shapes: Sequence[Shape]) -> bool:
        """Returns True if leaves of these shapes can be arrays in the file."""
        layout, axis = parse_layout(self.rule.layout), self.rule.axis
        if len(self.names) > 1:
            shapes = [with_size(shapes[0], axis, size) for size in self._sizes(shapes[0])]
        in_file = [file_shape_of(layout, shape) for shape in shapes]
        if len(self.paths) > 1:
            in_file = [joined(in_file, axis)]
        return bool(in_file) and None not in in_file

    def _sizes(self, shape: Shape) -> Sequence[int]:
        """Returns the sizes of the arrays that a leaf is split into; () if it cannot be."""
        size, count = sum(shape[self.rule.axis :][:1]), len(self.names)
        sizes = self.rule.parts or [size // count] * count
        return sizes if self.rule.axis < len(shape) and sum(sizes) == size else ()

    def arrays(self, leaves: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the arrays of the file by name, from the leaves."""
        rule, layout = self.rule, parse_layout(self.rule.layout)
        if len(self.names) > 1:
            cuts = list(itertools.accumulate(self._sizes(leaves[0].shape)))[:-1]
            leaves = np.split(leaves[0], cuts, rule.axis)
        if layout is not None:
            leaves = [layout.to_file(leaf) for leaf in leaves]
        if len(self.paths) > 1:
            leaves = [np.concatenate(leaves, rule.axis)]
        return dict(zip(self.names, leaves, strict=True))


def find_targets(paths: Collection[str], rename: Sequence[Rename]) -> list[Target]:
    """Returns the targets of all leaves, each once.

    Raises ValueError if a leaf has no rule or several, if a rule has only some of the leaves of an
    array, or if it would not read what it wrote.
    """
    targets: list[Target] = []
    rules: dict[str, list[Rename]] = {path: [] for path in paths}
    for rule in require_rules(rename):
        for match in filter(None, map(_regex(rule.states[0]).fullmatch, paths)):
            of_state = tuple(_fill(path, match.groups()) for path in rule.states)
            missing = [path for path in of_state if path not in paths]
            require_no_problems("params", missing, f"all of {', '.join(of_state)}, which are one")
            names = tuple(_fill(name, match.groups()) for name in rule.files)
            read = dict(_sources_of(rule, names[0], names))
            expected = f"a rule that reads {match.string} from {names[0]}, as it is written"
            require(tuple(read) == of_state, "rename", expected, [rule, *read])
            targets.append(Target(rule, names, of_state))
            for path in of_state:
                rules[path].append(rule)
    problems = [f"{path}: {found or 'none'}" for path, found in rules.items() if len(found) != 1]
    advice = "For a part of the leaves, export a part of the tree."
    require_no_problems("rename", problems, "one rule for each leaf", advice)
    return targets
