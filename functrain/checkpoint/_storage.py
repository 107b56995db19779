"""One checkpoint: a directory that is complete, or not there.

    checkpoint.json         the manifest: what each leaf is, and where its bytes are
    arrays-0.safetensors    the leaves, or those parts of them that process 0 has

`_local` and `_remote` say how it becomes complete, on disk and in an object store.
"""

# Orbax does not write the arrays: it has no checksums for them, holds copies of the state, and
# cannot leave its barriers when a process has died. See docs/design/checkpoint-store.md.

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from functrain.checkpoint import _leaves, _manifest, _processes
from functrain.checkpoint._arrays import read_leaves, require_complete, write_arrays
from functrain.checkpoint._errors import is_refusal
from functrain.checkpoint._leaves import Leaf
from functrain.checkpoint._local import arrays_name
from functrain.checkpoint._manifest import DOCUMENTS, STATE
from functrain.checkpoint._processes import ProcessGroup
from functrain.checkpoint._remote import files_at, resolve_path
from functrain.common import _tree
from functrain.common._checks import require_no_problems
from functrain.common._paths import errors_name_path
from functrain.common._types import PyTree

_T = TypeVar("_T")


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
            name = arrays_name(process, manifest["save_id"])
            try:
                with files_at(directory).open(os.path.join(directory, name)) as file:
                    # The bytes behind the header are leaves, which are verified below.
                    is_same = f"{zlib.crc32(file.read(header_size)):08x}" == checksum
                    if not is_same or file.seek(0, os.SEEK_END) != size:
                        raise OSError(0, "other bytes than were saved")
            except OSError as error:
                if is_refusal(error):
                    raise
                faults.append(f"{name}: {error.strerror}")
    uses = dict.fromkeys(manifest["leaves"], lambda read: read() is None)
    read_leaves(directory, manifest, uses, faults=faults)


# Writing a checkpoint, and replacing an old one.


def write_checkpoint(
    target: str,
    leaves: Mapping[str, Leaf],
    entries: Mapping[str, Any],
    group: ProcessGroup,
    require_writer: Callable[[], object] = lambda: None,
) -> None:
    """Writes a checkpoint, which appears at its target when it is complete. All processes call it.

    If it cannot be written, or the processes save different states or to different places, nothing
    of it is left. `entries` go into the manifest. No other save uses `group` at the same time.
    `require_writer` is called before the checkpoint appears, and its exception prevents that.
    """
    files, specs = files_at(target), {name: leaf.spec for name, leaf in leaves.items()}
    save_id = ""

    def write_parts() -> Any:
        _processes.wait_until_visible(target, first_target, lambda: files.has_begun(target))
        # Documents are those of the first process: the others may lack the arrays of a logger,
        # which is called there alone.
        expected = {
            name: spec
            for name, spec in first_specs.items()
            if name in specs or _leaves.tree_name(name) != DOCUMENTS
        }
        require_no_problems(
            target,
            _tree.spec_differences(expected, specs),
            "a state of the same leaves in all processes",
            "Nothing was saved. Create the state in the same way in every process.",
        )
        own = {name: leaf for name, leaf in leaves.items() if not leaf.is_copy or name in lacking}
        with files.create(target, arrays_name(jax.process_index(), save_id)) as file:
            return write_arrays(file, own, group.require_no_failure)

    def finish() -> None:
        records, incomplete = dict[str, Any](), list[str]()
        for name, leaf in leaves.items():
            records[name] = {"spec": leaf.spec, "shards": []}
            if leaf.stored_spec != leaf.spec:
                records[name]["stored"] = leaf.stored_spec
            for process, (_, shards) in enumerate(outcomes):
                records[name]["shards"] += [[process, *shard] for shard in shards.get(name, [])]
            try:
                require_complete(records[name])
            except ValueError as error:
                incomplete.append(f"{_leaves.leaf_path(name)}: {error}")
        require_no_problems(
            target,
            incomplete,
            "parts of the processes that make up each array once",
            "Nothing was saved. Place these arrays in the same way in every process.",
        )
        identified = {"save_id": save_id} if save_id else {}
        file_records = [record for record, _ in outcomes]
        manifest = {**entries, **identified, "files": file_records}
        names = [arrays_name(process, save_id) for process in range(len(outcomes))]
        require_writer()
        files.commit(target, _manifest.format_manifest(manifest, records), names)

    try:
        lacking = [name for name, leaf in leaves.items() if not leaf.shards]
        begin = group.call_on_first(lambda: [target, specs, lacking, files.begin(target)])
        first_target, first_specs, lacking, save_id = begin
        with errors_name_path(target):
            outcomes = group.gather(write_parts, only_first=True)
            group.call_on_first(finish)
    except BaseException:
        if _processes.is_first():
            files.abort(target, save_id)
        raise


def read_unless_replaced(target: str, read: Callable[[], _T]) -> _T:
    """Calls a function that reads a checkpoint; again if it was replaced in the meantime."""
    files = files_at(target)
    while True:
        identity = files.identity(target)
        try:
            return read()
        except Exception:
            # Several processes would see the replacement at different times.
            if _processes.is_multiprocess() or files.identity(target) == identity:
                raise


# One state in one directory.


def save(path: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False) -> None:
    """Saves a state to a new directory, and returns when it is on disk.

    The directory gets its name only when it is complete. With `overwrite`, a kill in the moment of
    the replacement leaves the old one as ``<path>.functrain-old``, where `load` finds it. If `path`
    is a symbolic link, the directory that it leads to is written or replaced.

    To save a training periodically, use `Checkpointer`. If there are several processes
    (`jax.distributed`), all of them call it, with a path that all of them can see.

    Args:
      path: A directory that does not exist yet, or a URL such as ``gs://bucket/run`` or
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
        if overwrite:
            files.undo_interrupted_replace(target)
        if not files.is_free(target) and not (overwrite and files.is_checkpoint(target)):
            raise FileExistsError(
                f"{target}: expected no such path, got {_manifest.describe_path(target)}. Choose "
                f"another path, or {'remove it' if overwrite else 'pass overwrite=True'}."
            )

    entries = {"trees": [STATE], "run": _manifest.fingerprint(state)}
    # Two processes that save to one path take turns; readers find a complete checkpoint anyway.
    turn = files.taking_turns(target)
    with turn if _processes.is_first() else contextlib.nullcontext():
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
    target = resolve_path(path)

    def read() -> PyTree:
        directory = files_at(target).find(target)
        manifest = _manifest.read_manifest(directory)
        return read_trees(directory, manifest, {STATE: like})[0][STATE]

    with _processes.main_group.raise_in_all():
        return read_unless_replaced(target, read)
