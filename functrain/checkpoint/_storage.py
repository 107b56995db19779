"""One checkpoint on disk: a directory that is whole, or not there.

    checkpoint.json         the manifest: what each leaf is, and where its bytes stand
    arrays-0.safetensors    the leaves, or the parts of them that process 0 has

The arrays are in the format of safetensors. The digests of the parts are in the manifest:
a bit that flips on a disk would come back as a weight. (A CRC finds accidents, not attackers.)
To restore a piece of a leaf, the parts that it touches are read and compared, in small chunks.

Orbax does not write the arrays, for five reasons. A process cannot leave its barriers when another
has died, and waits for 20 minutes. Two saves at the same time in one process collided in it. It
held two to three copies of a state. It compares no bytes when it reads. And digests need whole
leaves in memory, because its files do not keep the bytes in their order.

A checkpoint is written beside its place under another name, and renamed when it is whole. A
directory cannot be exchanged for another in one operation everywhere: an old one is kept beside
its place until the new one stands there, and is found there if a kill interrupted the exchange.
"""

import contextlib
import functools
import io
import json
import math
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from functrain.checkpoint import _leaves, _manifest, _processes
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._leaves import Box, Leaf, Read
from functrain.checkpoint._manifest import STATE, is_checkpoint, is_step
from functrain.checkpoint._processes import Together
from functrain.common import _locks, _tree
from functrain.common._types import PyTree

_AT_ONCE = 4 * 2**20  # bytes that are written and compared at once
_NEW, _OLD, _GONE = ".functrain-new", ".functrain-old", ".functrain-gone"

# Dtypes by their names in safetensors. Arrays of other dtypes are stored as their bytes.
_SIZES = {"I": "int", "U": "uint", "F": "float"}
DTYPES = {
    f"{x}{n}": f"{_SIZES[x]}{n}" for x in _SIZES for n in (8, 16, 32, 64) if x + str(n) != "F8"
}
DTYPES |= {"BOOL": "bool", "BF16": "bfloat16", "C64": "complex64", "F8_E4M3": "float8_e4m3fn"}
DTYPES |= {"F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
DTYPES |= {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# Arrays, written and read.


def _arrays_path(directory: str, process: int) -> str:
    return os.path.join(directory, _manifest.arrays_name(process))


def _write_arrays(path: str, leaves: Mapping[str, Leaf], check: Callable[[], None]) -> Any:
    """Writes the parts that this process has; its bytes are on the disk when it returns.

    What `check` raises between two pieces ends the writing. Returns, for the manifest: size of the
    file, size and digest of its header; and by name the shards, each with the offset of its bytes,
    where it is in the array, and its digest.
    """
    parts = [(name, box, array) for name, leaf in leaves.items() for box, array in leaf.shards]
    header, offset = dict[str, Any](), 0
    for name, box, array in parts:
        is_whole = _tree.strong_spec(array) == leaves[name].stored
        dtype = _NAMES.get(str(array.dtype))
        header[name if is_whole else f"{name}[{_text(box)}]"] = {
            "dtype": dtype or "U8",
            "shape": array.shape if dtype else (*array.shape, array.dtype.itemsize),
            "data_offsets": (offset, offset := offset + array.nbytes),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    offset, shards = len(text), dict[str, Any]()
    with open(path, "wb") as file:
        file.write(text)
        for name, box, array in parts:
            data, crc32 = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, 0
            for begin in range(0, array.nbytes, _AT_ONCE):
                check()
                piece = data[begin : begin + _AT_ONCE]
                crc32 = zlib.crc32(piece, crc32)
                file.write(piece)
            shards.setdefault(name, []).append([offset, _text(box), f"{crc32:08x}"])
            offset += array.nbytes
        file.flush()
        os.fsync(file.fileno())
    return [offset, len(text), f"{zlib.crc32(text):08x}"], shards


def _text(box: Box) -> str:
    return ",".join(f"{side.start}:{side.stop}" for side in box)


def _chunks(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Yields boxes of some 4 MiB that have the bytes of an array in their order."""
    axis = 0  # on which the array is cut; what is behind it fits into a chunk
    while itemsize * math.prod(shape[axis + 1 :]) > _AT_ONCE:
        axis += 1
    rows = max(1, _AT_ONCE // max(1, itemsize * math.prod(shape[axis + 1 :])))
    for index in np.ndindex(*shape[:axis]):
        for begin in range(0, shape[axis], rows) if shape else ():
            sides = [(i, i + 1) for i in index] + [(begin, min(begin + rows, shape[axis]))]
            yield *(slice(*side) for side in sides), *_leaves.whole_box(shape[axis + 1 :])
    if not shape:
        yield ()


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)


def _moved(box: Box, origin: Box, sign: int = 1) -> Any:
    """Returns a box within another one as a box of the whole array; with -1 the other way round."""
    pairs = zip(box, origin, strict=True)
    sides = (slice(x.start + sign * y.start, x.stop + sign * y.start) for x, y in pairs)
    return (*sides, ...)  # so that an index of a scalar gives an array, too


def _common(a: Box, b: Box) -> Box:
    """Returns what two boxes have in common; of size 0 for nothing."""
    pairs = zip(a, b, strict=True)
    ends = ((max(x.start, y.start), min(x.stop, y.stop)) for x, y in pairs)
    return tuple(slice(start, max(start, stop)) for start, stop in ends)


class _DamageError(Exception):
    """A leaf cannot be read; the message says why."""


class _StoredArrays:
    """The arrays of a checkpoint; what it opens is closed by `files`."""

    def __init__(
        self, directory: str, records: Any, files: contextlib.ExitStack, check: Callable[[], None]
    ) -> None:
        self._directory, self._records, self._check = directory, records, check
        self._files, self._opened = files, dict[int, io.FileIO]()
        self._verified = set[tuple[int, int]]()

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """Returns a part of an array, or all of it; what was read of it has its digests."""
        try:
            record = self._records[name]
            dtype, shape = _manifest.parse_spec(record.get("stored", record["spec"]))
            box = _leaves.whole_box(shape) if box is None else box
            shards = [self._shard(shard, dtype, shape) for shard in record["shards"]]
            sizes = [math.prod(_shape(_common(shard[2], box))) for shard in shards]
            if sum(sizes) != math.prod(_shape(box)):
                raise ValueError("parts of it are missing")
            result = np.empty(_shape(box), dtype)
            for shard, size in zip(shards, sizes, strict=True):
                if size:
                    self._read_shard(*shard, result, box)
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
            raise _DamageError(getattr(error, "strerror", None) or error) from error
        return result

    def _shard(
        self, record: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[int, int, Box, str]:
        """Returns a record of a shard; raises ValueError unless its file has all of its bytes."""
        process, offset, text, digest = record
        box = tuple(slice(*map(int, ends.split(":"))) for ends in text.split(",") if ends)
        if not all(0 <= x.start <= x.stop <= n for x, n in zip(box, shape, strict=True)):
            raise ValueError("a part of it is outside of it")
        end = offset + math.prod(_shape(box)) * dtype.itemsize
        if offset < 0 or end > os.fstat(self._open(process).fileno()).st_size:
            raise ValueError("its file is cut short")
        return process, offset, box, digest

    def _read_shard(
        self, process: int, offset: int, origin: Box, digest: str, result: np.ndarray, box: Box
    ) -> None:
        """Copies what a shard has of a box, a chunk at a time, and compares its digest."""
        file, crc32, dtype = self._open(process), 0, result.dtype
        file.seek(offset)
        for chunk in _chunks(_shape(origin), dtype.itemsize):
            self._check()
            shape, place = _shape(chunk), _moved(chunk, origin)[:-1]
            common = _common(place, box)
            is_needed = math.prod(_shape(common)) > 0
            if is_needed or (process, offset) not in self._verified:
                piece = file.read(math.prod(shape) * dtype.itemsize)
                crc32 = zlib.crc32(piece, crc32)
                if is_needed:
                    data = np.frombuffer(piece, dtype).reshape(shape)
                    result[_moved(common, box, -1)] = data[_moved(common, place, -1)]
            else:
                file.seek(math.prod(shape) * dtype.itemsize, os.SEEK_CUR)
        if (process, offset) not in self._verified and f"{crc32:08x}" != digest:
            raise ValueError("other bytes than were saved")
        self._verified.add((process, offset))

    def _open(self, process: int) -> io.FileIO:
        if process not in self._opened:
            file = _manifest.open_plain(_arrays_path(self._directory, process))
            self._opened[process] = self._files.enter_context(file)
        return self._opened[process]


def read_leaves(
    directory: str,
    manifest: Mapping[str, Any],
    uses: Mapping[str, Callable[[Read], Any]],
    check: Callable[[], None] = lambda: None,
    faults: Sequence[str] = (),
) -> dict[str, Any]:
    """Reads leaves one after the other.

    Args:
      directory: The checkpoint.
      manifest: Its own.
      uses: For each leaf what is called with what reads it. Only what it returns stays in memory.
      check: Called before each chunk; what it raises ends the reading.
      faults: What is known to be damaged already, for the CheckpointCorruptError that names all.
    """
    results, lines = dict[str, Any](), list(faults)
    with contextlib.ExitStack() as files:
        stored = _StoredArrays(directory, manifest["leaves"], files, check)
        for name, use in uses.items():
            try:
                result = use(functools.partial(stored.read, name))
            except _DamageError as error:
                spec = manifest["leaves"].get(name, {}).get("spec")
                lines.append(f"{_leaves.path_of(name)}: {spec}: {error}")
                results.clear()
            else:
                results |= {} if lines else {name: result}
                del result  # or it would stay while the next one is read
    if lines:
        raise CheckpointCorruptError(
            f"{directory}: its bytes are not those that were saved:\n{_tree.bullets(lines)}\n"
            "The checkpoint is damaged: take another."
        )
    return results


def read(
    directory: str,
    manifest: Mapping[str, Any],
    likes: dict[str, PyTree],
    beside: Iterable[str] = (),
) -> tuple[dict[str, PyTree], dict[str, np.ndarray]]:
    """Reads trees into the structures of others, by name in the file, and arrays beside them."""
    _leaves.require_same(directory, manifest, likes)
    leaves = _leaves.by_path(likes)
    uses: dict[str, Any] = dict.fromkeys(beside, lambda read: read())
    for name, like in leaves.items():
        uses[name] = functools.partial(_leaves.restored, _leaves.path_of(name), like)
    results = read_leaves(directory, manifest, uses, _processes.main.require_no_failure)
    values = [results.pop(name) for name in leaves]
    return jax.tree.unflatten(jax.tree.structure(likes), values), results


def verify(directory: str) -> None:
    """Reads all of a checkpoint; the CheckpointCorruptError names damaged files and leaves."""
    manifest, faults = _manifest.read_manifest(directory), list[str]()
    with _manifest.understood(f"{directory}: expected the digests of files"):
        for process, (size, header, digest) in enumerate(manifest["files"]):
            path = _arrays_path(directory, process)
            try:
                with _manifest.open_plain(path) as file:  # the rest of it are leaves
                    is_same = f"{zlib.crc32(file.read(header)):08x}" == digest
                    if not is_same or os.fstat(file.fileno()).st_size != size:
                        raise OSError(0, "other bytes than were saved")
            except OSError as error:
                faults.append(f"{os.path.basename(path)}: {error.strerror}")
    uses = dict.fromkeys(manifest["leaves"], lambda read: read() is None)
    read_leaves(directory, manifest, uses, faults=faults)


def bytes_of(directory: str) -> int:
    """Returns how many bytes the files of a checkpoint have."""
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(directory))


# How a checkpoint comes to stand in its place, and takes that of an old one.


def write(
    target: str,
    leaves: Mapping[str, Leaf],
    entries: Mapping[str, Any],
    together: Together,
    require_free: Callable[[], None],
) -> None:
    """Writes a checkpoint, which stands in its place when it is whole; all processes call it.

    Args:
      target: Where the checkpoint is to stand.
      leaves: By name; the same names in all processes.
      entries: What stands in the manifest beside them.
      together: For its parts, which no other save takes part in meanwhile.
      require_free: Called by the first process before anything is written.

    Raises:
      OSError: It cannot be written; nothing of it is left.
      ValueError: The processes do not save the same to the same place.
      OtherProcessError: Another process failed.
    """
    staging, specs = target + _NEW, {name: leaf.spec for name, leaf in leaves.items()}

    def prepare() -> list[Any]:
        require_free()
        remove(staging)
        os.makedirs(staging)
        return [target, specs]

    def write_own() -> Any:
        first_target, first_specs = first
        _processes.require_seen(target, first_target, lambda: os.path.isdir(staging))
        lines = _tree.spec_differences(first_specs, specs)
        if lines:
            raise ValueError(
                f"{target}: expected a state of the same leaves in all processes, got in "
                f"this one, beside the first:\n{_tree.bullets(lines)}\nNothing was saved."
            )
        path = _arrays_path(staging, jax.process_index())
        return _write_arrays(path, leaves, together.require_no_failure)

    def finish() -> None:
        records: dict[str, Any] = {}
        for name, leaf in leaves.items():
            stored = {} if leaf.stored == leaf.spec else {"stored": leaf.stored}
            records[name] = {"spec": leaf.spec, **stored, "shards": []}
        for process, (_, shards) in enumerate(written):
            for name, found in shards.items():
                records[name]["shards"] += [[process, *shard] for shard in found]
        files = [file for file, _ in written]
        _manifest.write_manifest(staging, {**entries, "files": files}, records)
        _sync(staging)
        _put(target)

    try:
        first = together.on_first(prepare)
        written = together.all_do(write_own, only_first=True)
        together.on_first(finish)
    except BaseException as error:
        if _processes.is_first():
            shutil.rmtree(staging, ignore_errors=True)  # a full disk needs the room
        if isinstance(error, OSError) and error.errno and error.filename is None:
            raise OSError(error.errno, error.strerror, staging) from None
        raise


def _put(target: str) -> None:
    """Puts what is staged into its place; one of old and new is whole at any moment."""
    if os.path.lexists(target):
        remove(target + _OLD)
        os.rename(target, target + _OLD)
    os.rename(target + _NEW, target)
    _sync(os.path.dirname(target))
    remove(target + _OLD)


def _sync(directory: str) -> None:
    """Brings a directory's names to the disk, where the system can."""
    if hasattr(os, "O_DIRECTORY"):  # not Windows
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(path: str) -> None:
    """Removes a directory; what a kill in the midst of it leaves is not under its name."""
    shutil.rmtree(path + _GONE, ignore_errors=True)
    if os.path.lexists(path):
        os.rename(path, path + _GONE)
        shutil.rmtree(path + _GONE)


def take_back(target: str) -> None:
    """Undoes an exchange that was interrupted between its two renames."""
    if is_checkpoint(target + _OLD) and not os.path.lexists(target):
        os.rename(target + _OLD, target)


def tidy(directory: str) -> None:
    """Removes what interrupted saves of steps left, and takes back what they took away."""
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if is_step(name.partition(".")[0]) and name.endswith(_OLD):
            take_back(path.removesuffix(_OLD))
            remove(path)
        elif is_step(name.partition(".")[0]) and name.endswith((_NEW, _GONE)):
            shutil.rmtree(path, ignore_errors=True)


def find(target: str, wanted: str = "a checkpoint") -> str:
    """Returns where the checkpoint of a place is: there, or kept beside it."""
    if os.path.lexists(target):
        return target
    if not is_checkpoint(target + _OLD):
        raise FileNotFoundError(f"{target}: expected {wanted}, got nothing. Check the path.")
    warnings.warn(
        f"{target}: expected a checkpoint, got nothing: a save was interrupted while it replaced "
        f"the one there. The one before it was kept, and is loaded: {target + _OLD}. The next save "
        "puts things in order.",
        stacklevel=3,
    )
    return target + _OLD


def identity(target: str) -> dict[str, tuple[int, int, int]]:
    """Returns what changes when what stands at a place is removed, or replaced by another."""
    found = {}
    for path in (target, target + _OLD):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            # Inode numbers are reused, so the time is part of the identity.
            found[path] = status.st_dev, status.st_ino, status.st_mtime_ns
    return found


def local(path: str | os.PathLike[str], name: str = "path") -> str:
    """Returns a path that stays, wherever the process goes and whatever links change."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name}: expected a path, such as 'runs/first', got {path!r}.")
    if not os.fspath(path) or "://" in os.fspath(path):
        raise ValueError(
            f"{name}: expected a path of this machine, such as 'runs/first' or '.', got "
            f"{os.fspath(path)!r}. What is elsewhere can be mounted, or copied."
        )
    return os.path.realpath(path)


# One state in one directory.


def save(path: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False) -> None:
    """Saves a state into a new directory; returns when it is written.

    The directory appears under its name only once it is whole. With `overwrite`, a kill in the
    moment of the exchange leaves the old one as ``<path>.functrain-old``, where `load` finds it.
    Through a symbolic link it is the directory behind it that is written or replaced. To save a
    training now and then: `Checkpointer`. Several processes (`jax.distributed`) call it all, with
    a path that all of them see.

    Args:
      path: A local directory that does not exist yet. Missing parents are made.
      state: Any pytree of arrays (`jax.Array` of any dtype, typed keys `key[...]`, numpy arrays
        and scalars), a `TrainState` for one. None and empty containers are structure, not leaves.
      overwrite: Replace what an earlier `save` wrote at `path`.

    Raises:
      FileExistsError: `path` exists, and `overwrite` is False or it holds something else.
      TypeError: A leaf is no array.
      ValueError: An array was donated, two leaves have one path, or `path` is an address.

    Examples:
      >>> import jax, jax.numpy as jnp, tempfile
      >>> state = {"w": jnp.arange(3.0), "rng": jax.random.key(0)}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/checkpoint", state)
      ...     print(load(f"{directory}/checkpoint", like=state)["w"])
      [0. 1. 2.]
    """
    with _processes.main.all_or_none():
        leaves = _leaves.on_host(_leaves.by_path({STATE: state}))
        target = local(path)
        os.makedirs(os.path.dirname(target), exist_ok=True)

    def require_free() -> None:
        if overwrite:
            take_back(target)
        if os.path.lexists(target) and not (overwrite and is_checkpoint(target)):
            raise FileExistsError(
                f"{target}: expected no such path, got {_manifest.kind_of(target)}. Choose another "
                + ("path, or remove it." if overwrite else "path, or pass overwrite=True.")
            )

    entries = {"trees": [STATE], "run": _manifest.fingerprint(state)}
    with contextlib.ExitStack() as stack:
        if _processes.is_first():
            stack.enter_context(_locks.exclusive_access(os.path.dirname(target)))
        write(target, leaves, entries, _processes.main, require_free)


def load(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Loads what `save` or a `Checkpointer` wrote, bit for bit, into the structure of `like`.

    A save that was killed in the moment it replaced another is not missed: the one before it is
    loaded, with a warning. So a run goes on, or begins, without a look at what is there::

        with contextlib.suppress(FileNotFoundError):
            state = ft.load(path, like=state)

    Args:
      path: The directory: what `save` got, or that of one step of a `Checkpointer`.
      like: A state of the structure, shapes and dtypes that were saved; its values are not used.
        An abstract one costs no memory: ``jax.eval_shape(lambda: TrainState.create(...))``.

    Returns:
      The state: the treedef of `like`, arrays strongly typed, numpy where `like` is numpy. An
      array gets the sharding of its leaf in `like`, or the default device where that leaf is
      abstract without a sharding, or not committed to a device.

    Raises:
      FileNotFoundError: Nothing is at `path`, and nothing was kept beside it.
      CheckpointMismatchError: What is there is no checkpoint, or its leaves are not those of
        `like`; the message names them, and nothing has been loaded. It is a ValueError.
      CheckpointCorruptError: What is there is damaged: every leaf is compared with its digest.

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
    target = local(path)
    while True:
        before = identity(target)
        try:
            with _processes.main.all_or_none():
                directory = find(target)
                return read(directory, _manifest.read_manifest(directory), {STATE: like})[0][STATE]
        except (CheckpointCorruptError, CheckpointMismatchError):
            if _processes.are_several() or identity(target) == before:
                raise  # else another process has replaced it meanwhile: that one is read
