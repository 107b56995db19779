"""Parts of a state from a file: warm starts, transfer learning, new heads."""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from functrain.checkpoint import _leaves
from functrain.checkpoint._array_files import ArrayFile, open_arrays
from functrain.checkpoint._checkpoint import read_current
from functrain.checkpoint._directory import read_newest, steps
from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._files import files_at, resolve_path
from functrain.checkpoint._manifest import STATE
from functrain.common import _patterns, _repr, _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.model._freeze import merged_paths
from functrain.step._state import TrainState

Rename = Callable[[str], str]
_FLOAT = re.compile(r"^b?float\w+")  # of a spec, such as bfloat16[8, 3]


class WarmStart(NamedTuple):
    """What `warm_start` returns: the state, and a report of its leaves.

    Attributes:
      state: The state with the leaves of the file.
      loaded: Paths in the state that were taken, each with the path in the file.
      unused: Paths in the file that were not taken.
      missing: Paths in the state that were asked for, but are not in the file: they are unchanged.
      unchanged: Paths in the state that were not asked for.
      source: The file or the checkpoint.

    Examples:
      >>> warm = WarmStart((), {"params/a/w": "a/w"}, ("b/w", "b/b"), (), ("step",), "old.h5")
      >>> print(warm)
      Warm start from old.h5
        loaded        1  params/a/w
        unused        2  b/w, b/b
        missing       0
        unchanged     1  step
    """

    state: PyTree
    loaded: Mapping[str, str]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    unchanged: tuple[str, ...]
    source: str

    def __repr__(self) -> str:
        lines = [f"Warm start from {_repr.shorten_start(self.source, 64)}"]
        for name in ("loaded", "unused", "missing", "unchanged"):
            paths = getattr(self, name)
            line = f"  {name:<10}{len(paths):>5,}  {', '.join(paths)}".rstrip()
            lines.append(line if len(line) <= 80 else f"{line[:77]}...")
        return "\n".join(lines)


def warm_start(
    state: PyTree,
    source: str | os.PathLike[str],
    *,
    take: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    rename: Rename | None = None,
    cast: bool = False,
) -> WarmStart:
    """Replaces leaves of a state by those of a file; all others are unchanged.

    Leaves are matched by path, and taken as they are. Those of PyTorch must be transposed for most
    layers of flax and Keras before the file is written.

    Patterns match paths of the state, as for files: `*` stands for one part of a path, `**` for any
    number of them: ``"params/encoder/**"``, ``"**/kernel"``. A leaf that the file does not have
    under its path is also looked for where it is with and without
    `freeze`: ``params/body/kernel`` fills ``model_state/frozen/body/kernel``, and vice versa. The
    base of a model of `lora` is filled in the same way. Patterns match both paths of such a leaf.

    Args:
      state: Any pytree of arrays. Leaves that are taken get the sharding of those they replace, and
        are strongly typed; the other leaves are the same arrays, not copies. Abstract leaves
        (`jax.ShapeDtypeStruct`) must all be taken.
      source: A checkpoint of `functrain.save`; the directory of a `Checkpointer`, whose last
        checkpoint that is not damaged is read (of a finished run, its result), or of one of its
        steps; a file `.safetensors`, `.weights.h5` (or another HDF5) or `.keras`. For the names
        that Keras gives to layers see `bridge.warm_start`.
      take: Patterns of the leaves to take. By default all; of each `TrainState` in the tree only
        params and model_state, so that training starts anew: at step 0, with the optimizer and the
        rng of `state`. An optimizer that starts from a copy of the params, such as
        `optax.contrib.schedule_free`, gets a copy of the new ones, unless `state` was trained;
        and so does a field that a subclass of `TrainState` adds, such as an average.
      skip: Patterns of leaves not to take even so, such as a head of another width.
      rename: Given a path in the file, returns the path in the state:
        ``rename=lambda path: f"params/{path}"``.
      cast: True converts floating-point leaves of another dtype.

    Returns:
      WarmStart(state, loaded, unused, missing, unchanged, source).

    Raises:
      FileNotFoundError: Nothing is at `source`.
      CheckpointMismatchError: The file is of an unknown format, or has leaves of another shape or
        dtype, which are named. Nothing was taken. It is a ValueError.
      CheckpointCorruptError: The file is damaged.
      ValueError: A pattern matches nothing; two paths in the file become the same; an abstract leaf
        is not taken.
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
        loaded        1  params/body
        unused        ...
        missing       0
        unchanged     ...
    """
    leaves = _state_leaves(state)
    take_patterns = None if take is None else _patterns.as_patterns("take", take)
    skip_patterns = _patterns.as_patterns("skip", skip)
    merged = merged_paths(leaves, with_lora=True)
    of_training, copied = _training_leaves(state, leaves)

    def matching(patterns: Sequence[str]) -> set[str]:
        pairs = merged.items()
        return {pair[0] for pair in pairs if any(_patterns.any_matches(patterns, x) for x in pair)}

    skipped = matching(skip_patterns)
    matched = leaves.keys() - of_training if take_patterns is None else matching(take_patterns)
    requested = [path for path in leaves if path in matched - skipped]

    def read(file: str, manifest: Mapping[str, Any] | None = None) -> WarmStart:
        with open_arrays(file, manifest) as arrays:
            names = _add_frozen(_map_paths(file, arrays.specs, rename), merged)
            known_paths = dict.fromkeys([*leaves, *merged.values()])
            for pattern in skip_patterns:  # of a leaf that the file or the state may lack
                _patterns.require_match("skip", pattern, {*known_paths, *names})
            for pattern in take_patterns or ():
                _patterns.require_match("take", pattern, known_paths)
            loaded = {path: names[path] for path in requested if path in names}
            if not loaded:
                raise CheckpointMismatchError(
                    f"{file}: expected leaves to take, such as {requested[:1]}, got only others, "
                    f"such as {list(names)[:1]}. Pass rename=, a function from paths in the file "
                    "to paths in the state, or use bridge.warm_start for a file of Keras."
                )
            specs = {path: arrays.specs[name] for path, name in loaded.items()}
            _require_same_specs(file, specs, leaves, cast)
            _warn_of_torch(file, loaded, leaves)
            _require_values({path: leaves[path] for path in _without(leaves, loaded)})
            new_leaves = dict(leaves)
            # One by one, so that the buffers of the file exist for one leaf at a time.
            for path, name in loaded.items():
                new_leaves[path] = _read_leaf(arrays, name, path, leaves[path])
            for path, param in copied.items():
                if param in loaded and path not in loaded and path not in skipped:
                    # A copy even of the same dtype: a buffer of two leaves cannot be donated.
                    copy = _tree.copy(new_leaves[param].astype(leaves[path].dtype))
                    new_leaves[path] = _tree.device_put_like(copy, leaves[path])
                    loaded[path] = names[param]
        return WarmStart(
            state=jax.tree.unflatten(jax.tree.structure(state), new_leaves.values()),
            loaded=loaded,
            unused=_without(arrays.specs, loaded.values()),
            missing=_without(requested, names),
            unchanged=_without(leaves, [*requested, *loaded]),
            source=file,
        )

    path = resolve_path(source, "source")
    if "" in files_at(path).names(path):  # a file
        return read(path)
    if steps(path):
        return read_newest(path, read)
    return read_current(path, read)


def _state_leaves(state: PyTree) -> dict[str, Any]:
    """Returns the leaves of a state by path; raises TypeError unless all are arrays."""
    leaves = _leaves.named_leaves({STATE: state})
    not_arrays = [leaf for leaf in leaves.values() if not _tree.is_array(leaf)]
    advice = "The order is warm_start(state, source); of a Keras model: bridge.create_state."
    require(not not_arrays, "state", "arrays", not_arrays[:1], advice, error=TypeError)
    return {_leaves.leaf_path(name): leaf for name, leaf in leaves.items()}


def _training_leaves(state: PyTree, leaves: Mapping[str, Any]) -> tuple[set[str], dict[str, str]]:
    """Returns the paths of leaves that belong to a training: all of a TrainState but its model.

    Also returns those of them that are copies of params, each with the path of its param.
    Optimizers keep some, and fields that a subclass of TrainState adds may.
    """
    paths = jax.tree.unflatten(jax.tree.structure(state), leaves)
    of_training, copied = set[str](), dict[str, str]()
    for train_state in _tree.nodes(paths, TrainState):
        structure = _tree.structure(train_state.params)

        def mirrors(node: Any, structure: Any = structure) -> bool:
            return bool(_tree.structure(node) == structure)

        others = train_state.replace(params=None, model_state=None)
        of_training.update(jax.tree.leaves(others))
        for node in filter(mirrors, jax.tree.leaves(others, is_leaf=mirrors)):
            pairs = dict(zip(*map(jax.tree.leaves, (node, train_state.params)), strict=True))
            are_equal = all(_is_copy(leaves[a], leaves[b]) for a, b in pairs.items())
            # Moments start with zeros, as many biases do.
            if are_equal and any(jnp.any(leaves[path] != 0) for path in pairs):
                copied |= pairs
    return of_training, copied


def _is_copy(leaf: Any, param: Any) -> bool:
    """Returns True if a leaf has the values of a param in its own dtype."""
    have_values = all(_tree.is_concrete(x) and not _tree.is_deleted(x) for x in (leaf, param))
    if not have_values or leaf.shape != param.shape or _tree.is_key(leaf):
        return False
    return bool(jnp.array_equal(leaf, _tree.device_put_like(param.astype(leaf.dtype), leaf)))


def _map_paths(source: str, file_paths: Collection[str], rename: Rename | None) -> dict[str, str]:
    """Returns the paths in a file by their paths in the state."""
    names: dict[str, str] = {}
    expected = "a path that no other leaf is renamed to"
    for file_path in file_paths:
        path = file_path if rename is None else rename(file_path)
        advice = f"{source} has {names.get(path)!r}, which is renamed to it, too."
        require(path not in names, f"rename({file_path!r})", expected, path, advice)
        names[path] = file_path
    return names


def _add_frozen(names: Mapping[str, str], merged: Mapping[str, str]) -> dict[str, str]:
    """Adds leaves whose paths differ only because a model is frozen, in the file or the state."""
    # An exact match has precedence over one by the merged path.
    merged_names = {path: names[name] for name, path in merged_paths(names).items()}
    frozen_names = {p: merged_names[path] for p, path in merged.items() if path in merged_names}
    return {**frozen_names, **merged_names, **names}


def _require_same_specs(
    source: str, specs: Mapping[str, str], leaves: Mapping[str, Any], cast: bool
) -> None:
    """Raises CheckpointMismatchError for another shape or dtype. No array is read."""
    expected = {path: _tree.strong_spec(leaves[path]) for path in specs}
    if cast:
        # The kind of floating-point numbers does not matter, but their shape does.
        expected, specs = (
            {path: _FLOAT.sub("float", spec) for path, spec in x.items()} for x in (expected, specs)
        )
    require_no_problems(
        source,
        _tree.spec_differences(expected, dict(specs)),
        "the shapes and dtypes of the state",
        "Nothing was taken. To convert floating-point numbers: cast=True. To leave leaves "
        "unchanged: skip= their paths.",
        error=CheckpointMismatchError,
    )


def _warn_of_torch(source: str, loaded: Mapping[str, str], leaves: Mapping[str, Any]) -> None:
    """Warns if square matrices under PyTorch's name become kernels, which are its transposes."""
    # The shape of any other one differs from that of its transpose, which is an error.
    for path, name in loaded.items():
        is_square = leaves[path].ndim > 1 and len(set(leaves[path].shape)) == 1
        if is_square and name.endswith(".weight") and path.endswith("/kernel"):
            warn(
                f"{source}: {name} was taken as {path}. PyTorch stores [outputs, inputs], but a "
                "kernel is [inputs, outputs]: transpose the matrices of PyTorch in the file."
            )
            return


def _require_values(leaves: Mapping[str, Any]) -> None:
    """Raises ValueError for leaves that have no values, and get none from the file."""
    abstract = jax.ShapeDtypeStruct
    missing = [p for p, x in leaves.items() if isinstance(x, abstract) or _tree.is_deleted(x)]
    expected = "arrays with values, neither abstract nor donated to a program, where none is taken"
    require_no_problems("state", missing, expected, "Nothing was taken. Create it with values.")


def _without(paths: Collection[str], removed: Collection[str]) -> tuple[str, ...]:
    removed = set(removed)
    return tuple(path for path in paths if path not in removed)


def _read_leaf(arrays: ArrayFile, name: str, path: str, like: Any) -> Any:
    """Reads an array as a leaf of the kind, dtype and sharding of another leaf."""
    data = arrays.read(name)
    if not _tree.is_key(like) and data.dtype != like.dtype:
        data = data.astype(like.dtype)
    return _leaves.restore_leaf(path, like, lambda index=...: data[index])
