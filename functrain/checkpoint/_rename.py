"""Rules by which arrays in the files of other programs are leaves of a state, and back."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._layout import (
    Layout,
    Shape,
    file_shape_of,
    joined_shape,
    parse_layout,
    with_size,
)
from functrain.common._checks import (
    is_integer,
    require,
    require_integer,
    require_no_problems,
)

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
      TypeError: A name or the layout is not a text.
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
        are_texts = all(isinstance(text, str) for text in (*names, self.layout))
        require(are_texts, "Rename", "names and a layout that are texts", self, error=TypeError)
        expected = "one name, of the array in the file or of the leaf in the state"
        require(min(len(self.files), len(self.states)) == 1, "Rename", expected, self)
        are_different = all(len(set(side)) == len(side) for side in (self.files, self.states))
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
    sources: dict[str, Source] = {}
    if rename is None or callable(rename):
        to_path = rename or str  # each name as it is
        pairs: Iterable[tuple[str, Source]] = ((to_path(name), Source((name,))) for name in names)
    else:
        rules = require_rules(rename)
        pairs = itertools.chain(*(_sources_of(rule, file, names) for rule in rules))
    for path, source in pairs:
        other = sources.get(path, source)
        expected = "a path that no other leaf is renamed to"
        advice = f"{file} has {other.names[0]!r}, which is renamed to it, too."
        require(path not in sources, f"rename({source.names[0]!r})", expected, path, advice)
        sources[path] = source
    return sources


def require_rules(rename: Any) -> Sequence[Rename]:
    """Returns the rules of an argument; raises TypeError for anything else."""
    is_sequence = isinstance(rename, Sequence) and all(isinstance(x, Rename) for x in rename)
    require(is_sequence, "rename", "a list of rules, ft.Rename(...)", rename, error=TypeError)
    rules: Sequence[Rename] = rename
    return rules


def _sources_of(rule: Rename, file: str, names: Collection[str]) -> Iterator[tuple[str, Source]]:
    """Yields the paths and sources of the leaves for which a rule has arrays in the file."""
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
    stars = {"*": "([^./]+?)", "**": "(.+?)"}
    text = "".join(stars.get(part) or re.escape(part) for part in _STARS.split(pattern))
    return re.compile(text, re.DOTALL)


def _fill(pattern: str, texts: Sequence[str]) -> str:
    """Returns a pattern with these texts in place of its stars."""
    values = iter(texts)
    return _STARS.sub(lambda _: next(values), pattern)


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
        array_shapes = [file_shape_of(layout, shape) for shape in shapes]
        if len(self.paths) > 1:
            array_shapes = [joined_shape(array_shapes, axis)]
        return bool(array_shapes) and None not in array_shapes

    def _sizes(self, shape: Shape) -> Sequence[int]:
        """Returns the sizes of the arrays that a leaf is split into; () if it cannot be."""
        axis, count = self.rule.axis, len(self.names)
        if axis >= len(shape):
            return ()
        sizes = self.rule.parts or [shape[axis] // count] * count
        return sizes if sum(sizes) == shape[axis] else ()

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
    rules_by_path: dict[str, list[Rename]] = {path: [] for path in paths}
    targets = [target for rule in require_rules(rename) for target in _targets_of(rule, paths)]
    for target in targets:
        for path in target.paths:
            rules_by_path[path].append(target.rule)
    problems = [
        f"{path}: {rules or 'none'}" for path, rules in rules_by_path.items() if len(rules) != 1
    ]
    advice = "For a part of the leaves, export a part of the tree."
    require_no_problems("rename", problems, "one rule for each leaf", advice)
    return targets


def _targets_of(rule: Rename, paths: Collection[str]) -> Iterator[Target]:
    """Yields the targets of the leaves that a rule matches."""
    for match in filter(None, map(_regex(rule.states[0]).fullmatch, paths)):
        leaf_paths = tuple(_fill(path, match.groups()) for path in rule.states)
        missing = [path for path in leaf_paths if path not in paths]
        require_no_problems("params", missing, f"all of {', '.join(leaf_paths)}, which are one")
        names = tuple(_fill(name, match.groups()) for name in rule.files)
        read_paths = [path for path, _ in _sources_of(rule, names[0], names)]
        expected = f"a rule that reads {match.string} from {names[0]}, as it is written"
        require(tuple(read_paths) == leaf_paths, "rename", expected, [rule, *read_paths])
        yield Target(rule, names, leaf_paths)
