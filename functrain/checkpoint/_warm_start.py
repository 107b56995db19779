"""A part of a state out of a file: warm starts, transfer learning, changed heads."""

import collections
import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from functrain.checkpoint import _files, _leaves
from functrain.checkpoint._about import parsed, read_about
from functrain.checkpoint._directory import Directory
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._place import find
from functrain.checkpoint._single import STATE
from functrain.checkpoint._store import blanks, read_each
from functrain.common import _patterns, _repr, _tree
from functrain.common._types import PyTree
from functrain.step._state import TrainState

Rename = Callable[[str], str]


class WarmStart(NamedTuple):
    """What `warm_start` returns: the state, and what it is made of, leaf by leaf.

    Its `repr` is a table of at most six lines.

    Attributes:
      state: With what was taken, in its place.
      taken: Paths in the state, each with that in the file.
      left: Paths in the file that were not taken.
      missing: Paths in the state that were asked for, and are not in the file: they stay.
      kept: Paths in the state that were not asked for: they stay.
      source: The file or the checkpoint.

    Examples:
      >>> warm = WarmStart((), {"params/a/w": "a/w"}, ("b/w", "b/b"), (), ("step",), "old.h5")
      >>> print(warm)
      Warm start from old.h5
        taken       1 leaf: params/a/w
        left        2 of the file: b/w, b/b
        missing     0 of the state
        kept        1 of the state, not asked for: step
    """

    state: PyTree
    taken: Mapping[str, str]
    left: tuple[str, ...]
    missing: tuple[str, ...]
    kept: tuple[str, ...]
    source: str

    def __repr__(self) -> str:
        rows = [
            ("taken", self.taken, "leaf" if len(self.taken) == 1 else "leaves"),
            ("left", self.left, "of the file"),
            ("missing", self.missing, "of the state"),
            ("kept", self.kept, "of the state" + ", not asked for" * bool(self.kept)),
        ]
        lines = [_row(f"  {name:<8}{len(x):>5,} {what}", list(x)) for name, x, what in rows]
        return "\n".join([f"Warm start from {_repr.ending(self.source, 64)}", *lines])


def warm_start(
    state: PyTree,
    source: str | os.PathLike[str],
    *,
    take: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    rename: Rename | None = None,
    cast: bool = False,
) -> WarmStart:
    """Takes leaves of a state out of a file; all others stay as they are.

    Leaves are matched by path. A pattern means paths of the state, as for files: `*` stands for
    one part of a path, `**` for any number: ``"params/encoder/**"``, ``"**/kernel"``.

    Args:
      state: Any pytree of arrays. Leaves that are taken get the sharding of those they replace, and
        are strongly typed; leaves that stay are the same arrays, not copies. Abstract leaves
        (`jax.ShapeDtypeStruct`) have to be taken, all of them.
      source: What `functrain.save` wrote; the directory of a `Checkpointer`, whose last checkpoint
        that is not damaged is read (of a finished run, its result), or of one of its steps; a
        file `.safetensors`, `.weights.h5` (or another HDF5) or `.keras`. For names of Keras see
        `bridge.warm_start`.
      take: Patterns of what to take. By default all; of a `TrainState` params and model_state, so
        that training begins anew: at step 0, with the optimizer and the rng of `state`.
      skip: Patterns of what to leave as it is all the same, such as a head of another width.
      rename: Given a path in the file, returns the path in the state:
        ``rename=lambda path: f"params/{path}"``.
      cast: Convert floating-point leaves of another dtype. A number that the new dtype cannot hold
        is an error.

    Returns:
      WarmStart(state, taken, left, missing, kept, source).

    Raises:
      FileNotFoundError: Nothing is at `source`.
      CheckpointMismatchError: It holds no arrays of a kind that is known; or leaves of another
        shape or dtype, which are named. Nothing was taken. It is a ValueError.
      CheckpointCorruptError: It is damaged.
      ValueError: A pattern means nothing; two paths in the file become one; an abstract leaf is
        not taken; `cast` would make numbers infinite.
      ImportError: A `.safetensors` file, and the library is not installed.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, optax, tempfile
      >>> def create(classes):
      ...     params = {"body": jnp.full(4, 1.0 * classes), "head": jnp.zeros((4, classes))}
      ...     return ft.TrainState.create(params=params, tx=optax.adam(1e-3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ft.save(f"{folder}/old", create(10))
      ...     warm = warm_start(create(2), f"{folder}/old", skip="params/head")
      >>> print(warm)
      Warm start from .../old
        taken       1 leaf: params/body
        left        ...
        missing     0 of the state
        kept        ...
    """
    if isinstance(state, str | os.PathLike):
        raise TypeError("the order is functrain.warm_start(state, source), got a path first")
    chosen = _Choice(take, skip, state)
    leaves = {_leaves.path_of(n): x for n, x in _leaves.by_path({STATE: state}).items()}
    _require_arrays(leaves)
    reasons: list[str] = []
    for name in _candidates(os.path.realpath(source)):
        try:
            opened = _files.opened if os.path.isfile(name) else _checkpoint
            with opened(name) as arrays:
                found, warm = _taken(name, arrays, leaves, chosen, rename, cast)
        except CheckpointCorruptError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            warnings.warn(f"Passed over, for {name}: {reason}", stacklevel=2)
        values = [found.get(path, leaf) for path, leaf in leaves.items()]
        return warm._replace(state=jax.tree.unflatten(jax.tree.structure(state), values))
    raise CheckpointCorruptError("\n".join(reasons))


def _row(head: str, paths: Sequence[str], width: int = 80) -> str:
    """Returns a line about paths, by their folders: the deepest for which there is room."""
    if not paths:
        return head
    room = width - len(head) - 2
    groups, depth = _folders(paths, 1), 1
    while len(", ".join(deeper := _folders(paths, depth + 1))) <= room and deeper != groups:
        groups, depth = deeper, depth + 1
    for shown in range(len(groups), 0, -1):
        more = f", {len(groups) - shown:,} more" if shown < len(groups) else ""
        listed = ", ".join(groups[:shown])
        if len(listed) + len(more) <= room or shown == 1:
            break
    return f"{head}: {_repr.ending(listed, room - len(more))}{more}"


def _folders(paths: Sequence[str], depth: int) -> list[str]:
    """Returns the beginnings of paths, and of how many each is the beginning."""
    found = collections.Counter("/".join(path.split("/")[:depth]) for path in paths)
    return [name if name in paths else f"{name} ({n:,})" for name, n in found.items()]


class _Choice:
    """Which paths of a state are asked for."""

    def __init__(
        self, take: str | Sequence[str] | None, skip: str | Sequence[str], state: PyTree
    ) -> None:
        training = isinstance(state, TrainState)
        self.by_default = take is None
        default = ("params/**", "model_state/**") if training else ("**",)
        self.take = default if take is None else _listed("take", take)
        self.skip = _listed("skip", skip)

    def means(self, path: str) -> bool:
        return _patterns.any_matches(self.take, path) and not _patterns.any_matches(self.skip, path)

    def require_all_used(
        self, source: str, names: Mapping[str, str], leaves: Collection[str]
    ) -> None:
        """Refuses patterns that mean nothing, since they are most likely mistyped.

        Args:
          source: For messages.
          names: Paths in the file, by path in the state.
          leaves: Paths in the state.
        """
        both = [path for path in leaves if path in names]
        for pattern in () if self.by_default else self.take:
            if not any(_patterns.matches(pattern, path) for path in both):
                in_state = any(_patterns.matches(pattern, path) for path in leaves)
                where, there = (source, list(names)) if in_state else ("the state", leaves)
                raise ValueError(_no_match("take", pattern, where, there))
        for pattern in self.skip:
            if not any(_patterns.matches(pattern, path) for path in {*names, *leaves}):
                raise ValueError(_no_match("skip", pattern, "the state", leaves))
        if not any(map(self.means, both)):
            asked = next(filter(self.means, leaves), "nothing that is asked for")
            of_keras = ", or take bridge.warm_start(state, file, model) for a file of Keras"
            hint = of_keras if source.endswith((".keras", ".h5")) else ""
            raise ValueError(
                f"{source}: expected paths of the state in it, got none that is asked for. "
                f"It has, for one, {next(iter(names), 'nothing at all')}; the state has {asked}. "
                f"Give rename= a function from paths in the file to paths in the state{hint}."
            )


def _listed(name: str, patterns: str | Sequence[str]) -> tuple[str, ...]:
    listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not all(isinstance(pattern, str) for pattern in listed):
        raise TypeError(f"{name}: expected patterns, such as 'params/**', got {patterns!r}")
    return listed


def _no_match(name: str, pattern: str, where: str, paths: Collection[str]) -> str:
    close = " or ".join(map(repr, _patterns.nearest(pattern, paths)))
    return (
        f"{name}: expected a pattern of paths in {where}, got {pattern!r}, which means none. "
        + (f"Nearest: {close}." if close else "There are no paths at all.")
    )


def _taken(
    source: str,
    arrays: _files.Arrays,
    leaves: Mapping[str, Any],
    choice: _Choice,
    rename: Rename | None,
    cast: bool,
) -> tuple[dict[str, Any], WarmStart]:
    """Returns the leaves that are taken out of a file that is open, and the report."""
    if not arrays.specs:
        raise CheckpointMismatchError(
            f"{source}: expected leaves to take, got none at all in it. Nothing was taken. Name "
            "the checkpoint of a state, or a file that has arrays."
        )
    names = _renamed(source, arrays.specs, rename)
    choice.require_all_used(source, names, leaves)
    asked = [path for path in leaves if choice.means(path)]
    taken = {path: names[path] for path in asked if path in names}
    _require_specs(source, {path: arrays.specs[n] for path, n in taken.items()}, leaves, cast)
    staying = {path: leaf for path, leaf in leaves.items() if path not in taken}
    if empty := [path for path, leaf in staying.items() if _is_without_values(leaf)]:
        raise ValueError(
            "state: expected arrays where nothing is taken, got shapes without values, or arrays "
            f"that were donated to a program:\n{_tree.bullets(empty)}\nNothing was taken. Make "
            "the state with values, or take the one that the program returned."
        )
    found, paths = {}, {name: path for path, name in taken.items()}
    for name, data in arrays.read(paths):  # one by one, so that not all of them are there twice
        path = paths[name]
        data = _converted(path, data, leaves[path])
        found[path] = _leaves.restored(path, leaves[path], data)
    return found, WarmStart(
        state=None,
        taken=taken,
        left=tuple(name for name in arrays.specs if name not in paths),
        missing=tuple(path for path in asked if path not in names),
        kept=tuple(path for path in leaves if not choice.means(path)),
        source=source,
    )


def _renamed(source: str, names: Collection[str], rename: Rename | None) -> dict[str, str]:
    """Returns paths in a file by path in the state."""
    found: dict[str, str] = {}
    for name in names:
        path = name if rename is None else rename(name)
        if not isinstance(path, str):
            raise TypeError(
                f"rename: expected a function of paths to paths, got {type(path).__name__} for "
                f"{name!r}. What is not to be taken may keep its name."
            )
        if path in found:
            raise ValueError(
                f"rename: expected another path for each in {source}, got {path!r} for "
                f"{found[path]!r} and for {name!r}."
            )
        found[path] = name
    return found


def _is_without_values(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or _tree.is_deleted(leaf)


def _require_arrays(leaves: Mapping[str, Any]) -> None:
    for path, leaf in leaves.items():
        if not _tree.is_array(leaf):
            is_model = hasattr(leaf, "stateless_call")
            hint = " Its state is bridge.create_state(model, tx)." if is_model else ""
            raise TypeError(f"state: expected an array at {path}, got {_tree.spec(leaf)}.{hint}")


def _require_specs(
    source: str, specs: Mapping[str, str], leaves: Mapping[str, Any], cast: bool
) -> None:
    """Refuses leaves of another shape or dtype, before anything is read."""
    wrong, castable = {}, True
    for path, spec in specs.items():
        wanted = _tree.strong_spec(leaves[path])
        shape = _shape_of_floats(spec)
        convertible = shape is not None and shape == _shape_of_floats(wanted)
        if spec != wanted and not (cast and convertible):
            wrong[path] = f"{path}: the file has {spec}, the state {wanted}"
            castable = castable and convertible
    if wrong:
        raise CheckpointMismatchError(
            f"{source}: expected the shapes and dtypes of the state, got others:\n"
            f"{_tree.bullets(list(wrong.values()))}\nNothing was taken. "
            + ("To convert: cast=True. " if castable else "")
            + f"To leave them as they are: skip={next(iter(wrong))!r}, or a pattern."
        )


def _shape_of_floats(spec: str) -> tuple[int, ...] | None:
    """Returns the shape of floating-point numbers, None of other leaves."""
    try:
        dtype, shape = parsed(spec)
    except (TypeError, ValueError):  # of a key, or a dtype that nobody here knows
        return None
    return shape if jnp.issubdtype(dtype, jnp.floating) else None


def _converted(path: str, data: np.ndarray, like: Any) -> np.ndarray:
    if _tree.is_key(like) or data.dtype == like.dtype:
        return data
    with np.errstate(over="ignore"):
        new = data.astype(like.dtype)
    if not np.array_equal(np.isfinite(data), np.isfinite(new)):
        raise ValueError(
            f"cast: expected numbers that {like.dtype} can hold, got larger ones in {path}, "
            f"{data.dtype} in the file. Nothing was taken."
        )
    return new


# Where arrays come from.


def _candidates(path: str) -> Iterator[str]:
    """Yields what may be read: one file or checkpoint, or steps, the last first."""
    place = find(path, "a checkpoint, or a file of arrays")
    if not os.path.isdir(place):
        yield place
        return
    directory = Directory(place)
    steps = directory.steps()
    if not steps:
        yield place
    for step in reversed(steps):
        yield directory.at(step)


@contextlib.contextmanager
def _checkpoint(directory: str) -> Iterator[_files.Arrays]:
    """Opens the state in a checkpoint; of a run that is over, what it returned."""
    about = read_about(directory)
    root = "final" if "final" in about["trees"] else STATE
    leaves = {n: said for n, said in about["leaves"].items() if _leaves.root_of(n) == root}
    names = {_leaves.path_of(name): name for name in leaves}

    def read(paths: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        wanted = [names[path] for path in paths]
        found = read_each(directory, about, blanks(about, wanted), lambda name, array: array)
        for name in wanted:
            yield _leaves.path_of(name), found.pop(name)

    yield _files.Arrays({path: leaves[name]["spec"] for path, name in names.items()}, read)
