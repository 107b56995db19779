"""Parts of a state from a file: warm starts, transfer learning, new heads."""

import functools
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from functrain.checkpoint import _leaves
from functrain.checkpoint._array_files import ArrayFile
from functrain.checkpoint._checkpoint import read_current
from functrain.checkpoint._directory import read_newest, steps
from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._files import MANIFEST, files_at, resolve_path
from functrain.checkpoint._manifest import STATE, parse_spec
from functrain.checkpoint._rename import Piece, Rename, Source, find_sources, make_piece
from functrain.checkpoint._sources import find_weights, open_arrays
from functrain.common import _patterns, _repr, _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.model._freeze import merged_paths
from functrain.step._state import TrainState

_FLOAT = re.compile(r"^b?float\w+")  # of a spec, such as bfloat16[8, 3]


class WarmStart(NamedTuple):
    """What `warm_start` returns: the state, and a report of its leaves.

    Attributes:
      state: The state with the leaves of the file.
      loaded: Paths in the state that were taken, each with the path in the file; with several, if
        it was joined from them.
      transformed: Those of them that were transposed, reshaped, split or joined.
      unused: Paths in the file that were not taken.
      missing: Paths in the state that were asked for, but are not in the file: they are unchanged.
      unchanged: Paths in the state that were not asked for.
      source: The file or the checkpoint.

    Examples:
      >>> warm = WarmStart((), {"params/a/w": "a/w"}, (), ("b/w", "b/b"), (), ("step",), "old.h5")
      >>> print(warm)
      Warm start from old.h5
        loaded        1  params/a/w
        transformed   0
        unused        2  b/w, b/b
        missing       0
        unchanged     1  step
    """

    state: PyTree
    loaded: Mapping[str, str]
    transformed: tuple[str, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    unchanged: tuple[str, ...]
    source: str

    def __repr__(self) -> str:
        lines = [f"Warm start from {_repr.shorten_start(self.source, 64)}"]
        for name in ("loaded", "transformed", "unused", "missing", "unchanged"):
            paths = getattr(self, name)
            line = f"  {name:<11}{len(paths):>4,}  {', '.join(paths)}".rstrip()
            lines.append(line if len(line) <= 80 else f"{line[:77]}...")
        return "\n".join(lines)


def warm_start(
    state: PyTree,
    source: str | os.PathLike[str],
    *,
    take: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    rename: Callable[[str], str] | Sequence[Rename] | None = None,
    cast: bool = False,
) -> WarmStart:
    """Replaces leaves of a state by those of a file; all others are unchanged.

    Leaves are matched by path, and taken as they are; `Rename` says which have other names, or
    other orders of axes, as those of PyTorch have. Leaves are read one by one, and in several
    processes each process reads the parts that it has.

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
        steps; a file `.safetensors`, `.safetensors.index.json` of several, `.npz`, `.weights.h5`
        (or another HDF5) or `.keras`; a directory with one model in safetensors, as on Hugging
        Face; or one of Orbax: a checkpoint, or that of a CheckpointManager, whose newest step is
        read. All of them may be at a URL that fsspec can read, such as ``gs://`` or ``hf://``
        (Orbax: that TensorStore can). For the names that Keras gives to layers see
        `bridge.warm_start`.
      take: Patterns of the leaves to take. By default all; of each `TrainState` in the tree only
        params and model_state, so that training starts anew: at step 0, with the optimizer and the
        rng of `state`. An optimizer that starts from a copy of the params, such as
        `optax.contrib.schedule_free`, gets a copy of the new ones, unless `state` was trained;
        and so does a field that a subclass of `TrainState` adds, such as an average.
      skip: Patterns of leaves not to take even so, such as a head of another width.
      rename: Given a path in the file, returns the path in the state:
        ``rename=lambda path: f"params/{path}"``; or rules of `Rename`, and then only what they
        match is taken.
      cast: True converts floating-point leaves of another dtype.

    Returns:
      WarmStart(state, loaded, transformed, unused, missing, unchanged, source).

    Raises:
      FileNotFoundError: Nothing is at `source`.
      CheckpointMismatchError: The file is of an unknown format, or has leaves of another shape or
        dtype, which are named. Nothing was taken. It is a ValueError.
      CheckpointCorruptError: The file is damaged, or one of its index is missing.
      ValueError: A pattern matches nothing; two paths in the file become the same; an abstract leaf
        is not taken.
      ImportError: A URL or an Orbax checkpoint, and the library for it is not installed.

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
        transformed   0
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
            sources = _add_frozen(find_sources(file, arrays.specs, rename), merged)
            known_paths = dict.fromkeys([*leaves, *merged.values()])
            for pattern in skip_patterns:  # of a leaf that the file or the state may lack
                _patterns.require_match("skip", pattern, {*known_paths, *sources})
            for pattern in take_patterns or ():
                _patterns.require_match("take", pattern, known_paths)
            taken = {path: sources[path] for path in requested if path in sources}
            if not taken:
                got = "only others" if sources else "none that a rule matches"
                raise CheckpointMismatchError(
                    f"{file}: expected leaves to take, such as {requested[:1]}, got {got}, such as "
                    f"{list(sources or arrays.specs)[:1]}. Pass rename=, a function of the "
                    "paths there or rules of ft.Rename; for a file of Keras: bridge.warm_start."
                )
            pieces = _make_pieces(file, taken, arrays.specs, leaves, merged, cast)
            _warn_of_torch(file, taken, leaves)
            _require_values({path: leaves[path] for path in _without(leaves, taken)})
            new_leaves = dict(leaves)
            # One by one, so that the buffers of the file exist for one leaf at a time.
            for path in taken:
                new_leaves[path] = _read_leaf(arrays, pieces[path], path, leaves[path])
            loaded = {path: ", ".join(source.names) for path, source in taken.items()}
            for path, param in copied.items():
                if param in loaded and path not in loaded and path not in skipped:
                    # A copy even of the same dtype: a buffer of two leaves cannot be donated.
                    copy = _tree.copy(new_leaves[param].astype(leaves[path].dtype))
                    new_leaves[path] = _tree.device_put_like(copy, leaves[path])
                    loaded[path] = loaded[param]
        return WarmStart(
            state=jax.tree.unflatten(jax.tree.structure(state), new_leaves.values()),
            loaded=loaded,
            transformed=tuple(path for path, source in taken.items() if source.is_transformed),
            unused=_without(arrays.specs, [name for x in taken.values() for name in x.names]),
            missing=_without(requested, sources),
            unchanged=_without(leaves, [*requested, *loaded]),
            source=file,
        )

    path = resolve_path(source, "source", is_written=False)
    names = files_at(path).names(path)
    if MANIFEST in names:
        return read_current(path, read)
    if steps(path):
        return read_newest(path, read)
    if "" in names or (names and find_weights(path) is not None):
        return read(path)
    return read_current(path, read)  # raises an error that says what is there


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


def _add_frozen(sources: Mapping[str, Source], merged: Mapping[str, str]) -> dict[str, Source]:
    """Adds leaves whose paths differ only because a model is frozen, in the file or the state."""
    # An exact match has precedence over one by the merged path.
    by_merged = {path: sources[name] for name, path in merged_paths(sources).items()}
    of_frozen = {p: by_merged[path] for p, path in merged.items() if path in by_merged}
    return {**of_frozen, **by_merged, **sources}


def _make_pieces(
    file: str,
    sources: Mapping[str, Source],
    specs: Mapping[str, str],
    leaves: Mapping[str, Any],
    merged: Mapping[str, str],
    cast: bool,
) -> dict[str, Piece]:
    """Returns how the leaves are made; raises an error for another shape or dtype."""
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    shapes |= {merged_path: shapes[path] for path, merged_path in merged.items()}
    pieces: dict[str, Piece] = {}
    found: dict[str, str] = {}
    for path, source in sources.items():
        stored = [specs[name] for name in source.names]
        if not source.is_transformed:
            pieces[path], found[path] = Piece(source.names, (), None, 0, None), stored[0]
            continue
        # A random key has no dtype that NumPy could transpose.
        are_keys = any(spec.startswith("key<") for spec in stored)
        parsed = [] if are_keys else list(map(parse_spec, stored))
        made = make_piece(source, shapes[path], shapes, [shape for _, shape in parsed])
        if made is None:
            found[path] = f"{', '.join(stored)} by {source.rule}"
        else:
            dtype = _most_different([dtype for dtype, _ in parsed], leaves[path].dtype)
            pieces[path], found[path] = made, _tree.format_spec(dtype, shapes[path])
    _require_same_specs(file, found, leaves, cast)
    return pieces


def _most_different(dtypes: Sequence[Any], like: Any) -> Any:
    """Returns the one of the dtypes of joined arrays that is least like that of their leaf."""
    return max(dtypes, key=lambda x: (x != like, not jnp.issubdtype(x, jnp.floating)))


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


def _warn_of_torch(file: str, taken: Mapping[str, Source], leaves: Mapping[str, Any]) -> None:
    """Warns if square matrices under PyTorch's name become kernels, which are its transposes."""
    # The shape of any other one differs from that of its transpose, which is an error.
    for path, source in taken.items():
        is_square = leaves[path].ndim > 1 and len(set(leaves[path].shape)) == 1
        name = source.names[0]
        is_plain = is_square and source.rule is None
        if is_plain and name.endswith(".weight") and path.endswith("/kernel"):
            warn(
                f"{file}: {name} was taken as {path}. PyTorch stores [outputs, inputs], but a "
                f"kernel is [inputs, outputs]: Rename({name!r}, {path!r}, 'o i -> i o')."
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


def _read_leaf(arrays: ArrayFile, source: Piece, path: str, like: Any) -> Any:
    """Reads an array as a leaf of the kind, dtype and sharding of another leaf."""

    def read(name: str, index: Any = None) -> Any:
        data = arrays.read(name, index)
        return data if _tree.is_key(like) else data.astype(like.dtype, copy=False)

    return _leaves.restore_leaf(path, like, functools.partial(source.read, read))
