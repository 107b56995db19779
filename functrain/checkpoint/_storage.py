"""One checkpoint on disk: a directory that is complete, or not there.

    checkpoint.json         the manifest: what each leaf is, and where its bytes are
    arrays-0.safetensors    the leaves, or those parts of them that process 0 has

A checkpoint is written beside its target under a temporary name, and renamed when it is complete.
"""

# Orbax does not write the arrays: it has no checksums for them, holds copies of the state, and
# cannot leave its barriers when a process has died. See docs/design/checkpoint-store.md.

import contextlib
import functools
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from functrain.checkpoint import _leaves, _manifest, _processes
from functrain.checkpoint._arrays import read_leaves, write_arrays
from functrain.checkpoint._leaves import Leaf
from functrain.checkpoint._manifest import STATE, arrays_path, is_checkpoint, is_step_name
from functrain.checkpoint._processes import ProcessGroup
from functrain.common import _locks, _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._types import PyTree
from functrain.common._warnings import warn

_T = TypeVar("_T")

_NEW, OLD, _DELETED = ".functrain-new", ".functrain-old", ".functrain-gone"


def read_trees(
    directory: str,
    manifest: Mapping[str, Any],
    likes: dict[str, PyTree],
    extra_arrays: Iterable[str] = (),
) -> tuple[dict[str, PyTree], dict[str, np.ndarray]]:
    """Reads trees into the structures of others, and arrays of other names."""
    _leaves.require_leaves(directory, manifest, likes)
    leaves = _leaves.named_leaves(likes)
    uses: dict[str, Any] = dict.fromkeys(extra_arrays, lambda read: read())
    for name, like in leaves.items():
        uses[name] = functools.partial(_leaves.restore_leaf, _leaves.leaf_path(name), like)
    results = read_leaves(directory, manifest, uses, _processes.main_group.require_no_failure)
    values = list(map(results.pop, leaves))
    return jax.tree.unflatten(jax.tree.structure(likes), values), results


def verify(directory: str) -> None:
    """Reads all of a checkpoint; the CheckpointCorruptError names damaged files and leaves."""
    # Damage is collected rather than raised, so that one error names all of it.
    manifest, faults = _manifest.read_manifest(directory), list[str]()
    with _manifest.parsing(f"{directory}: expected the checksums of files"):
        for process, (size, header_size, checksum) in enumerate(manifest["files"]):
            path = arrays_path(directory, process)
            try:
                with _manifest.open_regular_file(path) as file:
                    # The bytes behind the header are leaves, which are verified below.
                    is_same = f"{zlib.crc32(file.read(header_size)):08x}" == checksum
                    if not is_same or os.fstat(file.fileno()).st_size != size:
                        raise OSError(0, "other bytes than were saved")
            except OSError as error:
                faults.append(f"{os.path.basename(path)}: {error.strerror}")
    uses = dict.fromkeys(manifest["leaves"], lambda read: read() is None)
    read_leaves(directory, manifest, uses, faults=faults)


# Writing a checkpoint, and replacing an old one.


def write_checkpoint(
    target: str, leaves: Mapping[str, Leaf], entries: Mapping[str, Any], group: ProcessGroup
) -> None:
    """Writes a checkpoint, and moves it to its target when it is complete. All processes call it.

    If it cannot be written, or the processes save different states or to different places, nothing
    of it is left. `entries` go into the manifest. No other save uses `group` at the same time.
    """
    staging, specs = target + _NEW, {name: leaf.spec for name, leaf in leaves.items()}

    def prepare_staging() -> list[Any]:
        remove(staging)  # left by a save that was killed
        os.makedirs(staging)
        return [target, specs]

    def write_parts() -> Any:
        _processes.wait_until_visible(target, first_target, lambda: os.path.isdir(staging))
        require_no_problems(
            target,
            _tree.spec_differences(first_specs, specs),
            "a state of the same leaves in all processes",
            "Nothing was saved. Create the state in the same way in every process.",
        )
        path = arrays_path(staging, jax.process_index())
        return write_arrays(path, leaves, group.require_no_failure)

    def finish() -> None:
        records: dict[str, Any] = {}
        for name, leaf in leaves.items():
            records[name] = {"spec": leaf.spec, "shards": []}
            if leaf.stored_spec != leaf.spec:
                records[name]["stored"] = leaf.stored_spec
            for process, (_, shards) in enumerate(outcomes):
                records[name]["shards"] += [[process, *shard] for shard in shards.get(name, [])]
        files = [file for file, _ in outcomes]
        _manifest.write_manifest(staging, {**entries, "files": files}, records)
        # All bytes are on disk before the checkpoint gets its name.
        _sync_directory(staging)
        _replace(target)

    try:
        first_target, first_specs = group.call_on_first(prepare_staging)
        outcomes = group.gather(write_parts, only_first=True)
        group.call_on_first(finish)
    except BaseException as error:
        if _processes.is_first():
            shutil.rmtree(staging, ignore_errors=True)  # a full disk needs the space
        if isinstance(error, OSError) and error.errno and error.filename is None:
            raise OSError(error.errno, error.strerror, staging) from None
        raise


def _replace(target: str) -> None:
    """Moves the staged checkpoint to its target. At any moment the old or the new is complete."""
    # Not every system can replace a directory in one operation: the old one is kept beside the
    # target until the new one is in place. If a kill interrupts this, the old one is loaded.
    if os.path.lexists(target):
        remove(target + OLD)
        os.rename(target, target + OLD)
    os.rename(target + _NEW, target)
    _sync_directory(os.path.dirname(target))
    remove(target + OLD)


def _sync_directory(directory: str) -> None:
    """Flushes the names in a directory to disk, where the system can."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(path: str) -> None:
    """Removes a directory."""
    # It is renamed first: a kill in the middle would otherwise leave a part of it under its name.
    shutil.rmtree(path + _DELETED, ignore_errors=True)
    if os.path.lexists(path):
        os.rename(path, path + _DELETED)
        shutil.rmtree(path + _DELETED)


def undo_interrupted_replace(target: str) -> None:
    """Moves the old checkpoint back if a replacement was interrupted between its two renames."""
    if is_checkpoint(target + OLD) and not os.path.lexists(target):
        os.rename(target + OLD, target)


def clean_up(directory: str) -> None:
    """Removes what interrupted saves of steps left, and restores what they had moved away."""
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if not is_step_name(name.partition(".")[0]):
            continue
        if name.endswith(OLD):
            undo_interrupted_replace(path.removesuffix(OLD))
            remove(path)
        elif name.endswith((_NEW, _DELETED)):
            shutil.rmtree(path, ignore_errors=True)


def find_checkpoint(target: str, expected: str = "a checkpoint") -> str:
    """Returns the target, or the old checkpoint beside it if a replacement was interrupted."""
    if os.path.lexists(target):
        return target
    if not is_checkpoint(target + OLD):
        raise FileNotFoundError(f"{target}: expected {expected}, got nothing. Check the path.")
    warn(
        f"{target}: expected a checkpoint, got nothing: a save was interrupted while it replaced "
        f"this checkpoint. The previous one was kept, and is loaded: {target + OLD}. The next save "
        "cleans up.",
    )
    return target + OLD


def read_unless_replaced(target: str, read: Callable[[], _T]) -> _T:
    """Calls a function that reads a checkpoint; again if it was replaced in the meantime."""
    while True:
        identity = _file_identity(target)
        try:
            return read()
        except Exception:
            # Several processes would see the replacement at different times.
            if _processes.is_multiprocess() or _file_identity(target) == identity:
                raise


def _file_identity(target: str) -> dict[str, tuple[int, int, int]]:
    """Returns a value that changes when the checkpoint at a path is removed or replaced."""
    identities = {}
    for path in (target, target + OLD):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            # Inode numbers are reused, so the mtime is part of the identity.
            identities[path] = status.st_dev, status.st_ino, status.st_mtime_ns
    return identities


def resolve_local_path(path: str | os.PathLike[str], name: str = "path") -> str:
    """Returns an absolute path that later changes of links or the working directory leave alone."""
    is_path = isinstance(path, str | os.PathLike)
    advice = "The path comes first: save(path, state), load(path, like)." if name == "path" else ""
    require(is_path, name, "a path, such as 'runs/first'", path, advice, error=TypeError)
    text = os.fspath(path)
    expected = "a path on this machine, such as 'runs/first' or '.'"
    advice = "Mount remote storage as a folder, or copy the files."
    require(text and "://" not in text, name, expected, text, advice)
    return os.path.realpath(path)


# One state in one directory.


def save(path: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False) -> None:
    """Saves a state to a new directory, and returns when it is on disk.

    The directory gets its name only when it is complete. With `overwrite`, a kill in the moment of
    the replacement leaves the old one as ``<path>.functrain-old``, where `load` finds it. If `path`
    is a symbolic link, the directory that it leads to is written or replaced.

    To save a training periodically, use `Checkpointer`. If there are several processes
    (`jax.distributed`), all of them call it, with a path that all of them can see.

    Args:
      path: A local directory that does not exist yet. Missing parents are created.
      state: Any pytree of arrays (`jax.Array` of any dtype, typed keys `key[...]`, numpy arrays
        and scalars), such as a `TrainState`. None and empty containers are structure, not leaves.
      overwrite: True replaces what an earlier `save` wrote at `path`.

    Raises:
      FileExistsError: `path` exists, and `overwrite` is False or it holds something else.
      TypeError: A leaf is not an array.
      ValueError: An array was donated, two leaves have the same path, or `path` is a URL.

    Examples:
      >>> import jax, jax.numpy as jnp, tempfile
      >>> state = {"w": jnp.arange(3.0), "rng": jax.random.key(0)}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/checkpoint", state)
      ...     print(load(f"{directory}/checkpoint", like=state)["w"])
      [0. 1. 2.]
    """
    with _processes.main_group.raise_in_all():
        target = resolve_local_path(path)
        leaves = _leaves.fetch_leaves(_leaves.named_leaves({STATE: state}))
        os.makedirs(os.path.dirname(target), exist_ok=True)

    def require_free() -> None:
        if overwrite:
            undo_interrupted_replace(target)
        if os.path.lexists(target) and not (overwrite and is_checkpoint(target)):
            raise FileExistsError(
                f"{target}: expected no such path, got {_manifest.describe_path(target)}. Choose "
                f"another path, or {'remove it' if overwrite else 'pass overwrite=True'}."
            )

    entries = {"trees": [STATE], "run": _manifest.fingerprint(state)}
    # Two processes that save to one path take turns; readers find a complete checkpoint anyway.
    lock = _locks.exclusive_access(os.path.dirname(target))
    with lock if _processes.is_first() else contextlib.nullcontext():
        _processes.main_group.call_on_first(require_free)
        write_checkpoint(target, leaves, entries, _processes.main_group)


def load(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Loads what `save` or a `Checkpointer` wrote, bit for bit, into the structure of `like`.

    If a save was killed in the moment it replaced an older checkpoint, the older one is loaded,
    with a warning. So a script can resume a run, or start it, without a look at the directory::

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
      FileNotFoundError: Nothing is at `path`, and no older checkpoint was kept beside it.
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
    target = resolve_local_path(path)

    def read() -> PyTree:
        directory = find_checkpoint(target)
        manifest = _manifest.read_manifest(directory)
        return read_trees(directory, manifest, {STATE: like})[0][STATE]

    with _processes.main_group.raise_in_all():
        return read_unless_replaced(target, read)
