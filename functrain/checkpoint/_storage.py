"""One checkpoint on disk: a directory that is complete, or not there.

    checkpoint.json         the manifest: what each leaf is, and where its bytes are
    arrays-0.safetensors    the leaves, or those parts of them that process 0 has

The arrays are in the format of safetensors. CRC-32 checksums of all parts are in the manifest. To
restore a piece of a leaf, only the parts that it touches are read and compared, in small chunks.

A checkpoint is written beside its target under a temporary name, and renamed when it is complete.
"""

# Orbax does not write the arrays, for five reasons:
# - A process cannot leave its barriers when another has died, and waits for 20 minutes.
# - Two saves at the same time in one process collided in it.
# - It held two to three copies of a state.
# - It compares no bytes when it reads: a bit that flips on a disk would be returned as a weight.
# - Checksums need whole leaves in memory, because its files do not keep the bytes in their order.

import contextlib
import functools
import io
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from functrain.checkpoint import _leaves, _manifest, _processes
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._leaves import Box, Leaf, Reader
from functrain.checkpoint._manifest import STATE, arrays_path, is_checkpoint, is_step_name
from functrain.checkpoint._processes import ProcessGroup
from functrain.common import _locks, _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._types import PyTree
from functrain.common._warnings import warn

# Bytes that are written, or read and compared, at once: the memory that it takes beside a leaf.
_CHUNK_BYTES = 4 * 2**20
_NEW, OLD, _DELETED = ".functrain-new", ".functrain-old", ".functrain-gone"

# Dtypes by their names in safetensors. Arrays of other dtypes are stored as bytes.
DTYPES = {"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64", "F8_E4M3": "float8_e4m3fn"}
DTYPES |= {"F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
DTYPES |= {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
DTYPES |= {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
DTYPES |= {"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"}
DTYPES |= {"F16": "float16", "F32": "float32", "F64": "float64"}
_SAFETENSORS_NAMES = dict(zip(DTYPES.values(), DTYPES, strict=True))


# Writing arrays.


def _write_arrays(path: str, leaves: Mapping[str, Leaf], check: Callable[[], None]) -> Any:
    """Writes the parts that this process has. Their bytes are on disk when the call returns.

    Args:
      path: The file.
      leaves: Leaves by name.
      check: Called before each chunk; its exception ends the writing.

    Returns:
      For the manifest, two things. ``[size of the file, size of its header, checksum of its
      header]``; and by leaf ``[offset in the file, box in the array, checksum]`` for each part.
    """
    header, offset = dict[str, Any](), 0
    for name, leaf in leaves.items():
        for box, array in leaf.shards:
            # A part of an array is stored under the name of the leaf with its box. Dtypes that
            # safetensors lacks are stored as bytes, along one more axis.
            is_complete = _tree.strong_spec(array) == leaf.stored_spec
            dtype = _SAFETENSORS_NAMES.get(str(array.dtype))
            header[name if is_complete else f"{name}[{_box_to_text(box)}]"] = {
                "dtype": dtype or "U8",
                "shape": array.shape if dtype else (*array.shape, array.dtype.itemsize),
                "data_offsets": (offset, offset + array.nbytes),
            }
            offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    text = len(text).to_bytes(8, "little") + text
    shards = dict[str, Any]()
    with open(path, "wb") as file:
        file.write(text)
        for name, leaf in leaves.items():
            for box, array in leaf.shards:
                begin = file.tell()
                checksum = _write_in_chunks(file, array, check)
                record = [begin, _box_to_text(box), f"{checksum:08x}"]
                shards.setdefault(name, []).append(record)
        file.flush()
        os.fsync(file.fileno())
    return [len(text) + offset, len(text), f"{zlib.crc32(text):08x}"], shards


def _write_in_chunks(file: Any, array: np.ndarray, check: Callable[[], None]) -> int:
    """Writes the bytes of an array, and returns their checksum."""
    data, checksum = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, 0
    for begin in range(0, array.nbytes, _CHUNK_BYTES):
        check()
        chunk = data[begin : begin + _CHUNK_BYTES]
        checksum = zlib.crc32(chunk, checksum)
        file.write(chunk)
    return checksum


# Boxes: parts of an array.


def _box_to_text(box: Box) -> str:
    return ",".join(f"{side.start}:{side.stop}" for side in box)


def _text_to_box(text: str) -> Box:
    return tuple(slice(*map(int, side.split(":"))) for side in text.split(",") if side)


def _box_shape(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)


def _box_size(box: Box) -> int:
    return math.prod(_box_shape(box))


def _shift(box: Box, origin: Box, sign: int = 1) -> Box:
    """Converts a box relative to another box to one of the whole array; -1 converts it back."""
    pairs = zip(box, origin, strict=True)
    return tuple(slice(x.start + sign * y.start, x.stop + sign * y.start) for x, y in pairs)


def _intersection(a: Box, b: Box) -> Box:
    """Returns the common part of two boxes; a box of size 0 if there is none."""
    sides = []
    for x, y in zip(a, b, strict=True):
        start = max(x.start, y.start)
        sides.append(slice(start, max(start, min(x.stop, y.stop))))
    return tuple(sides)


def _chunk_boxes(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Yields boxes of at most 4 MiB that cover an array in the order of its bytes."""
    if not shape:
        yield ()
        return
    # The array is cut along one axis: the first whose slices fit into a chunk.
    axis = 0
    while itemsize * math.prod(shape[axis + 1 :]) > _CHUNK_BYTES:
        axis += 1
    row_bytes = itemsize * math.prod(shape[axis + 1 :])
    rows = max(1, _CHUNK_BYTES // max(1, row_bytes))
    for index in np.ndindex(*shape[:axis]):
        outer = tuple(slice(i, i + 1) for i in index)
        for begin in range(0, shape[axis], rows):
            side = slice(begin, min(begin + rows, shape[axis]))
            yield *outer, side, *_leaves.full_box(shape[axis + 1 :])


# Reading arrays.

_Shard = tuple[int, int, Box, str]  # process, offset in its file, box in the array, checksum


class _DamageError(Exception):
    """A leaf cannot be read; the message says why."""


class _StoredArrays:
    """The arrays of a checkpoint.

    Args:
      directory: The checkpoint.
      records: Entries of the leaves in its manifest.
      files: Closes the opened files.
      check: Called before each chunk; its exception ends the reading.
    """

    def __init__(
        self, directory: str, records: Any, files: contextlib.ExitStack, check: Callable[[], None]
    ) -> None:
        self._directory, self._records, self._check = directory, records, check
        self._exit_stack, self._open_files = files, dict[int, io.FileIO]()
        self._verified = set[tuple[int, int]]()  # process and offset of shards

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """Returns the part of an array in a box, or all of it, after comparing checksums."""
        # Every entry of a crafted manifest may be wrong, so all of it is checked in here.
        try:
            record = self._records[name]
            dtype, shape = _manifest.parse_spec(record.get("stored", record["spec"]))
            box = _leaves.full_box(shape) if box is None else box
            needed_shards, covered = [], 0
            for shard_record in record["shards"]:
                shard = self._parse_shard(shard_record, dtype.itemsize, shape)
                common_size = _box_size(_intersection(shard[2], box))
                covered += common_size
                if common_size:
                    needed_shards.append(shard)
            # Before memory is taken: a crafted spec may ask for terabytes.
            if covered != _box_size(box):
                raise ValueError("parts of it are missing")
            result = np.empty(_box_shape(box), dtype)
            for shard in needed_shards:
                self._read_shard(*shard, result, box)
        except (
            ArithmeticError,
            AttributeError,  # a number or a list in place of a text or a dict
            LookupError,
            OSError,
            TypeError,
            ValueError,
        ) as error:
            raise _DamageError(getattr(error, "strerror", None) or error) from error
        return result

    def _parse_shard(self, record: Any, itemsize: int, shape: tuple[int, ...]) -> _Shard:
        """Returns process, offset, box and checksum of a shard; raises ValueError if impossible."""
        process, offset, text, checksum = record
        box = _text_to_box(text)
        for side, length in zip(box, shape, strict=True):
            if not 0 <= side.start <= side.stop <= length:
                raise ValueError("a part of it is outside of it")
        end = offset + _box_size(box) * itemsize
        if offset < 0 or end > os.fstat(self._open(process).fileno()).st_size:
            raise ValueError("its file is cut short")
        return process, offset, box, checksum

    def _read_shard(
        self, process: int, offset: int, shard_box: Box, checksum: str, result: np.ndarray, box: Box
    ) -> None:
        """Copies the part of a shard that is in a box, chunk by chunk, and compares its checksum.

        A shard that was verified before is not verified again: its other chunks are skipped.
        """
        file, crc32, dtype = self._open(process), 0, result.dtype
        is_verified = (process, offset) in self._verified
        file.seek(offset)
        for chunk in _chunk_boxes(_box_shape(shard_box), dtype.itemsize):
            self._check()
            chunk_box = _shift(chunk, shard_box)
            common = _intersection(chunk_box, box)
            chunk_bytes = _box_size(chunk) * dtype.itemsize
            if is_verified and not _box_size(common):
                file.seek(chunk_bytes, os.SEEK_CUR)
                continue
            chunk_data = file.read(chunk_bytes)
            crc32 = zlib.crc32(chunk_data, crc32)
            if _box_size(common):
                # The ellipsis makes an index of a scalar return an array, too.
                target: Any = (*_shift(common, box, -1), ...)
                source: Any = (*_shift(common, chunk_box, -1), ...)
                array = np.frombuffer(chunk_data, dtype).reshape(_box_shape(chunk))
                result[target] = array[source]
        # A CRC detects accidents, not attackers.
        if not is_verified and f"{crc32:08x}" != checksum:
            raise ValueError("other bytes than were saved")
        self._verified.add((process, offset))

    def _open(self, process: int) -> io.FileIO:
        if process not in self._open_files:
            file = _manifest.open_regular_file(arrays_path(self._directory, process))
            self._open_files[process] = self._exit_stack.enter_context(file)
        return self._open_files[process]


def read_leaves(
    directory: str,
    manifest: Mapping[str, Any],
    uses: Mapping[str, Callable[[Reader], Any]],
    check: Callable[[], None] = lambda: None,
    faults: Sequence[str] = (),
) -> dict[str, Any]:
    """Reads leaves one after the other, and returns a result for each.

    Args:
      directory: The checkpoint.
      manifest: Its manifest.
      uses: For each leaf a function that is given a reader. Only its result stays in memory.
      check: Called before each chunk; its exception ends the reading.
      faults: Damage that is known already, for the one error that names all of it.

    Raises:
      CheckpointCorruptError: Something is damaged. All leaves are read, and all damage is named.
    """
    results, lines = dict[str, Any](), list(faults)
    with contextlib.ExitStack() as files:
        stored = _StoredArrays(directory, manifest["leaves"], files, check)
        for name, use in uses.items():
            try:
                result = use(functools.partial(stored.read, name))
            except _DamageError as error:
                spec = manifest["leaves"].get(name, {}).get("spec")
                lines.append(f"{_leaves.leaf_path(name)}: {spec}: {error}")
                results.clear()
            else:
                if not lines:
                    results[name] = result
                del result  # the name would keep it in memory while the next leaf is read
    if lines:
        raise CheckpointCorruptError(
            f"{directory}: its bytes are not those that were saved:\n{_tree.bullets(lines)}\n"
            "The checkpoint is damaged: take another."
        )
    return results


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


def size_on_disk(directory: str) -> int:
    """Returns the size of all files of a checkpoint in bytes."""
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(directory))


# Writing a checkpoint, and replacing an old one.


def write_checkpoint(
    target: str,
    leaves: Mapping[str, Leaf],
    entries: Mapping[str, Any],
    group: ProcessGroup,
    require_free: Callable[[], None],
) -> None:
    """Writes a checkpoint, and moves it to its target when it is complete. All processes call it.

    Args:
      target: Path of the checkpoint.
      leaves: Leaves by name; the same names in all processes.
      entries: Other entries of the manifest.
      group: A group that no other save uses at the same time.
      require_free: Called in the first process before anything is written.

    Raises:
      OSError: The checkpoint cannot be written; nothing of it is left.
      ValueError: The processes save different states, or to different places.
      OtherProcessError: Another process failed.
    """
    staging, specs = target + _NEW, {name: leaf.spec for name, leaf in leaves.items()}

    def prepare_staging() -> list[Any]:
        require_free()
        remove(staging)  # left by a save that was killed
        os.makedirs(staging)
        return [target, specs]

    def write_arrays() -> Any:
        _processes.wait_until_visible(target, first_target, lambda: os.path.isdir(staging))
        require_no_problems(
            target,
            _tree.spec_differences(first_specs, specs),
            "a state of the same leaves in all processes",
            "Nothing was saved. Create the state in the same way in every process.",
        )
        path = arrays_path(staging, jax.process_index())
        return _write_arrays(path, leaves, group.require_no_failure)

    def finish() -> None:
        records: dict[str, Any] = {}
        for name, leaf in leaves.items():
            record = records[name] = {"spec": leaf.spec, "shards": list[Any]()}
            if leaf.stored_spec != leaf.spec:
                record["stored"] = leaf.stored_spec
        files = []
        for process, (file, shards) in enumerate(outcomes):
            files.append(file)
            for name, shard_records in shards.items():
                for shard_record in shard_records:
                    records[name]["shards"].append([process, *shard_record])
        _manifest.write_manifest(staging, {**entries, "files": files}, records)
        # All bytes are on disk before the checkpoint gets its name.
        _sync_directory(staging)
        _replace(target)

    try:
        first_target, first_specs = group.call_on_first(prepare_staging)
        outcomes = group.gather(write_arrays, only_first=True)
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


def file_identity(target: str) -> dict[str, tuple[int, int, int]]:
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
    with contextlib.ExitStack() as stack:
        if _processes.is_first():
            stack.enter_context(_locks.exclusive_access(os.path.dirname(target)))
        write_checkpoint(target, leaves, entries, _processes.main_group, require_free)


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
    while True:
        identity = file_identity(target)
        try:
            with _processes.main_group.raise_in_all():
                directory = find_checkpoint(target)
                manifest = _manifest.read_manifest(directory)
                return read_trees(directory, manifest, {STATE: like})[0][STATE]
        except (CheckpointCorruptError, CheckpointMismatchError):
            # A writer may have replaced the checkpoint in the meantime: then read the new one.
            if _processes.is_multiprocess() or file_identity(target) == identity:
                raise
