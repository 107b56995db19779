"""One checkpoint: written by all processes, read, verified; and `save` and `load` of one state."""

# Orbax does not write the arrays: it has no checksums for them, holds copies of the state, and
# cannot leave its barriers when a process has died. See docs/design/checkpoint-store.md.

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from functrain.checkpoint import _leaves, _manifest, _processes
from functrain.checkpoint._arrays import StoredArrays, is_complete, write_arrays
from functrain.checkpoint._errors import PARSE_ERRORS, ObjectStoreError, corrupt_on
from functrain.checkpoint._files import MANIFEST, arrays_name, files_at, is_part, resolve_path
from functrain.checkpoint._leaves import Leaf
from functrain.checkpoint._manifest import DOCUMENTS, FILE, STATE
from functrain.checkpoint._processes import ProcessGroup
from functrain.common import _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._locks import exclusive_access
from functrain.common._paths import errors_name_path
from functrain.common._types import PyTree
from functrain.engine._position import Position

_T = TypeVar("_T")


# Given a manifest, returns the structures to load into, by name of the tree.
Likes = Callable[[dict[str, Any]], dict[str, PyTree]]
Content = tuple["Restored", dict[str, PyTree], dict[str, Any]]


class Restored(NamedTuple):
    """What `Checkpointer.restore` returns.

    Attributes:
      state: The state, in the structure that was asked for.
      position: The position of the training.
      values: The values that were saved with it, such as ``{"val_loss": 0.3}``.
      documents: The documents that were saved with it; by a run its history, hooks and data.

    Examples:
      >>> Restored(state=(), position=Position(step=3), values={}, documents={}).position.step
      3
    """

    state: PyTree
    position: Position
    values: dict[str, float]
    documents: dict[str, Any]


def read_checkpoint(likes: Likes, path: str, manifest: dict[str, Any]) -> Content:
    """Loads a checkpoint. Returns its content, its trees by name, and its manifest."""
    expected = f"{path}: expected a position and documents"
    with StoredArrays(path, manifest) as stored:
        trees = _read_trees(stored, likes(manifest))
        with corrupt_on(*PARSE_ERRORS, expected=expected):
            documents = _manifest.decode(manifest["documents"], stored.read)
            position = Position(**manifest.get("position", {}))
    return Restored(trees.get(STATE), position, manifest["values"], documents), trees, manifest


def _read_trees(stored: StoredArrays, likes: dict[str, PyTree]) -> dict[str, PyTree]:
    """Reads trees into the structures of others."""
    _leaves.require_leaves(stored.directory, stored.manifest, likes)
    leaves = []
    for name, like in _leaves.named_leaves(likes).items():
        read = functools.partial(stored.read, name)
        leaves.append(_leaves.restore_leaf(_leaves.leaf_path(name), like, read))
    trees: dict[str, PyTree] = jax.tree.unflatten(jax.tree.structure(likes), leaves)
    return trees


def read_current(path: str, read: Callable[[str, dict[str, Any]], _T]) -> _T:
    """Calls a function with the path of a checkpoint and its manifest; again if it is replaced."""
    manifest = _manifest.read_manifest(path)
    while True:
        try:
            return read(path, manifest)
        except Exception:
            # Several processes would see the replacement at different times.
            if _processes.is_multiprocess():
                raise
            older, manifest = manifest, _manifest.read_manifest(path)
            if manifest["save_id"] == older["save_id"]:
                raise


def verify(directory: str) -> dict[str, Any]:
    """Reads all of a checkpoint, and returns its manifest.

    The CheckpointCorruptError names the first damaged leaf.
    """

    def read(path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        with StoredArrays(path, manifest) as stored:
            for name in manifest["leaves"]:
                stored.read(name)
        return manifest

    return read_current(directory, read)


def require_files(directory: str) -> dict[str, Any]:
    """Compares the sizes of a checkpoint's files, and returns its manifest.

    The CheckpointCorruptError says which are missing or cut short.
    """

    def read(path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        with StoredArrays(path, manifest) as stored:
            stored.require_files()
        return manifest

    return read_current(directory, read)


def write_checkpoint(
    directory: str,
    leaves: Mapping[str, Leaf],
    entries: Mapping[str, Any],
    group: ProcessGroup,
    require_writer: Callable[[], object] = lambda: None,
) -> None:
    """Writes a checkpoint, or replaces one. All processes call it.

    If it cannot be written, or the processes save different states or to different places, nothing
    of it is left. `entries` go into the manifest. No other save uses `group` at the same time.
    `require_writer` is called before the checkpoint appears, and its exception prevents that.
    """
    files = files_at(directory)
    # Documents are those of the first process: the others may lack the arrays of a logger, which
    # is called there alone.
    shared_names = [name for name in leaves if _leaves.tree_name(name) != DOCUMENTS]
    specs = {name: leaves[name].spec for name in shared_names}
    shared = group.call_on_first(lambda: [directory, specs, secrets.token_hex(4)])
    first_directory, first_specs, save_id = shared
    is_committing = False

    def write_parts() -> Any:
        _processes.require_same_path(directory, first_directory)
        require_no_problems(
            directory,
            _tree.spec_differences(first_specs, specs),
            "a state of the same leaves in all processes",
            "Nothing was saved. Create the state in the same way in every process.",
        )
        files.make_directory(directory)
        path = os.path.join(directory, arrays_name(jax.process_index(), save_id))
        with files.create(path) as file:
            return write_arrays(file, leaves)

    def commit() -> None:
        nonlocal is_committing
        names = [arrays_name(process, save_id) for process in range(len(outcomes))]
        are_visible = _processes.wait_until(lambda: files.has(directory, names))
        expected = "the arrays that all processes have written"
        advice = "Use a path that all processes see and no other program writes to."
        got = "only some of them"
        require(are_visible, directory, expected, got, advice, error=RuntimeError)
        records = _leaf_records(directory, leaves, [shards for *_, shards in outcomes])
        for process, (_, length, checksum, _) in enumerate(outcomes):
            header = [process, 0, f"0:{length}", checksum]
            records[f"{FILE}/{names[process]}"] = {"spec": f"uint8[{length}]", "shards": [header]}
        size = sum(size for size, *_ in outcomes)
        all_entries = {**entries, "save_id": save_id, "bytes": size}
        manifest = _manifest.format_manifest(all_entries, records)
        require_writer()
        is_committing = True
        files.replace(os.path.join(directory, MANIFEST), manifest)
        # What cannot be deleted now is left to the next writer.
        with contextlib.suppress(OSError, ObjectStoreError):
            delete_unneeded(directory, save_id)

    with errors_name_path(directory):
        try:
            outcomes = group.gather(write_parts)
            group.call_on_first(commit)
        except BaseException:
            # A full disk needs the space. But an upload that fails may have stored the manifest,
            # which needs the arrays.
            if _processes.is_first() and not is_committing:
                with contextlib.suppress(OSError, ObjectStoreError):
                    names = files.names(directory)
                    files.delete(directory, [x for x in names if f"-{save_id}." in x])
            raise


def _leaf_records(
    directory: str, leaves: Mapping[str, Leaf], shards_by_process: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the records of leaves for the manifest; ValueError if parts of them are missing."""
    records = dict[str, Any]()
    for name, leaf in leaves.items():
        shards = [[i, *x] for i, parts in enumerate(shards_by_process) for x in parts.get(name, [])]
        record = records[name] = {"spec": leaf.spec, "shards": shards}
        if leaf.stored_spec != leaf.spec:
            record["stored"] = leaf.stored_spec
        expected = "parts of the processes that make up each array once"
        advice = "Nothing was saved. Place it in the same way in every process."
        path = f"{directory}: {_leaves.leaf_path(name)}"
        require(is_complete(record), path, expected, "others", advice)
    return records


def delete_unneeded(directory: str, save_id: str) -> None:
    """Deletes the arrays of all saves but one, and what killed saves left."""
    files = files_at(directory)
    names = [name for name in files.names(directory) if is_part(name)]
    files.delete(directory, [name for name in names if not save_id or f"-{save_id}." not in name])


# One state in one directory.


def save(path: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False) -> None:
    """Saves a state to a directory, and returns when it is on disk.

    The directory is a checkpoint only when it is complete, and one that is replaced stays until the
    new one is complete: a kill leaves one of them. If `path` is a symbolic link, the directory that
    it leads to is written.

    To save a training periodically, use `Checkpointer`. If there are several processes
    (`jax.distributed`), all of them call it, with a path that all of them can see.

    Args:
      path: A directory that is empty or does not exist yet, or a URL such as ``gs://bucket/run`` or
        ``s3://bucket/run`` (``pip install 'functrain[remote]'``). Missing parents are created.
      state: Any pytree of arrays (`jax.Array` of any dtype, typed keys `key[...]`, numpy arrays
        and scalars), such as a `TrainState`. None and empty containers are structure, not leaves.
      overwrite: True replaces what an earlier `save` wrote at `path`.

    Raises:
      FileExistsError: `path` exists, and `overwrite` is False or it holds something else.
      TypeError: A leaf is not an array.
      ValueError: An array was donated, or two leaves have the same path.
      RuntimeError: An object store refused the request or could not be reached.

    Examples:
      >>> import jax, jax.numpy as jnp, tempfile
      >>> state = {"w": jnp.arange(3.0), "rng": jax.random.key(0)}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/checkpoint", state)
      ...     print(load(f"{directory}/checkpoint", like=state)["w"])
      [0. 1. 2.]
    """
    with _processes.main_group.raise_in_all():
        target = resolve_path(path)
        files = files_at(target)
        leaves = _leaves.fetch_leaves(_leaves.named_leaves({STATE: state}))
        files.make_directory(os.path.dirname(target))

    def require_free() -> None:
        names = files.names(target)
        if not (all(map(is_part, names)) or (overwrite and MANIFEST in names)):
            raise FileExistsError(
                f"{target}: expected no such path, or an earlier checkpoint and overwrite=True, "
                "got an existing one. Choose another path."
            )

    entries = {"trees": [STATE], "run": _manifest.fingerprint(state)}
    # Two processes that save to one path take turns; readers find a complete checkpoint anyway.
    is_locked = _processes.is_first() and "://" not in target
    with exclusive_access(os.path.dirname(target)) if is_locked else contextlib.nullcontext():
        _processes.main_group.call_on_first(require_free)
        write_checkpoint(target, leaves, entries, _processes.main_group)


def load(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Loads what `save` or a `Checkpointer` wrote, bit for bit, into the structure of `like`.

    A save that was killed leaves the checkpoint before it, or none. So a script can resume a run,
    or start it, without a look at the directory::

        with contextlib.suppress(FileNotFoundError):
            state = ft.load(path, like=state)

    Args:
      path: The directory that `save` was given, or that of one step of a `Checkpointer`.
      like: A state of the structure, shapes and dtypes that were saved; its values are not used.
        An abstract one takes no memory: ``jax.eval_shape(lambda: TrainState.create(...))``.

    Returns:
      The state: the treedef of `like`, arrays strongly typed, numpy where `like` is numpy. An
      array gets the sharding of its leaf in `like`, or the default device if that leaf is abstract
      without a sharding, or not committed to a device.

    Raises:
      FileNotFoundError: Nothing is at `path`, or only what a killed save left.
      CheckpointMismatchError: `path` is not a checkpoint, or its leaves are not those of `like`;
        the message names them, and nothing was loaded. It is a ValueError.
      CheckpointCorruptError: The checkpoint is damaged: every leaf is compared with its checksum.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, tempfile
      >>> from functrain import TrainState
      >>> def create():
      ...     return TrainState.create(params={"w": jnp.ones(3)}, tx=optax.adam(1e-3))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/checkpoint", create())
      ...     state = load(f"{directory}/checkpoint", like=jax.eval_shape(create))
      >>> print(state.step, state.params["w"])
      0 [1. 1. 1.]
    """
    target = resolve_path(path)

    def read(path: str, manifest: dict[str, Any]) -> PyTree:
        with StoredArrays(path, manifest) as stored:
            return _read_trees(stored, {STATE: like})[STATE]

    with _processes.main_group.raise_in_all():
        return read_current(target, read)
