"""Parts of a state from a file: warm starts, transfer learning, new heads."""

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from functrain.checkpoint import _leaves
from functrain.checkpoint._array_files import ArrayFile
from functrain.checkpoint._checkpoint import read_current
from functrain.checkpoint._directory import read_newest, steps
from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._files import MANIFEST, files_at, resolve_path
from functrain.checkpoint._pieces import Piece, make_pieces
from functrain.checkpoint._rename import Rename, Source
from functrain.checkpoint._selection import Selection, all_sources, select
from functrain.checkpoint._sources import find_weights, open_arrays
from functrain.common import _repr, _tree
from functrain.common._checks import require_no_problems
from functrain.common._types import PyTree
from functrain.common._warnings import warn


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
    selection = select(state, take, skip)

    def read(file: str, manifest: Mapping[str, Any] | None = None) -> WarmStart:
        with open_arrays(file, manifest) as arrays:
            return _read(file, arrays, state, selection, rename, cast)

    path = resolve_path(source, "source", is_written=False)
    names = files_at(path).names(path)
    if MANIFEST in names:
        return read_current(path, read)
    if steps(path):
        return read_newest(path, read)
    if "" in names or (names and find_weights(path) is not None):
        return read(path)
    return read_current(path, read)  # raises an error that says what is there


def _read(
    file: str,
    arrays: ArrayFile,
    state: PyTree,
    selection: Selection,
    rename: Callable[[str], str] | Sequence[Rename] | None,
    cast: bool,
) -> WarmStart:
    """Reads the selected leaves from an open file, after all checks."""
    leaves = selection.leaves
    sources = all_sources(selection, file, arrays.specs, rename)
    leaf_sources = {path: sources[path] for path in selection.requested if path in sources}
    _require_leaves(file, leaf_sources, selection, sources, arrays.specs)
    pieces = make_pieces(file, leaf_sources, arrays.specs, leaves, selection.merged_paths, cast)
    _warn_of_torch(file, leaf_sources, leaves)
    _require_values({path: leaves[path] for path in _without(leaves, leaf_sources)})
    # One by one, so that the buffers of the file exist for one leaf at a time.
    read_leaves = {
        path: _read_leaf(arrays, piece, path, leaves[path]) for path, piece in pieces.items()
    }
    copies = _copies(selection, read_leaves)
    names = {path: ", ".join(source.names) for path, source in leaf_sources.items()}
    loaded = names | {path: names[selection.copies[path]] for path in copies}
    new_leaves = {**leaves, **read_leaves, **copies}
    return WarmStart(
        state=jax.tree.unflatten(jax.tree.structure(state), new_leaves.values()),
        loaded=loaded,
        transformed=tuple(path for path, source in leaf_sources.items() if source.is_transformed),
        unused=_without(arrays.specs, [name for x in leaf_sources.values() for name in x.names]),
        missing=_without(selection.requested, sources),
        unchanged=_without(leaves, [*selection.requested, *loaded]),
        source=file,
    )


def _require_leaves(
    file: str,
    leaf_sources: Mapping[str, Source],
    selection: Selection,
    sources: Mapping[str, Source],
    specs: Mapping[str, str],
) -> None:
    """Raises CheckpointMismatchError if the file has none of the requested leaves."""
    if not leaf_sources:
        got = "only others" if sources else "none that a rule matches"
        raise CheckpointMismatchError(
            f"{file}: expected leaves to take, such as {selection.requested[:1]}, got {got}, such "
            f"as {list(sources or specs)[:1]}. Pass rename=, a function of the paths there or "
            "rules of ft.Rename; for a file of Keras: bridge.warm_start."
        )


def _copies(selection: Selection, read_leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns new copies, by path, of the params that were read, where the state has copies."""
    copies = {}
    for path, param in selection.copies.items():
        if param in read_leaves and path not in read_leaves and path not in selection.skipped:
            # A copy even of the same dtype: a buffer of two leaves cannot be donated.
            like = selection.leaves[path]
            copy = _tree.copy(read_leaves[param].astype(like.dtype))
            copies[path] = _tree.device_put_like(copy, like)
    return copies


def _warn_of_torch(
    file: str, leaf_sources: Mapping[str, Source], leaves: Mapping[str, Any]
) -> None:
    """Warns if square matrices under PyTorch's name become kernels, which are its transposes."""
    # The shape of any other one differs from that of its transpose, which is an error.
    for path, source in leaf_sources.items():
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


def _read_leaf(arrays: ArrayFile, piece: Piece, path: str, like: Any) -> Any:
    """Reads an array as a leaf of the kind, dtype and sharding of another leaf."""

    def read(name: str, index: Any = None) -> Any:
        data = arrays.read(name, index)
        return data if _tree.is_key(like) else data.astype(like.dtype, copy=False)

    return _leaves.restore_leaf(path, like, functools.partial(piece.read, read))
