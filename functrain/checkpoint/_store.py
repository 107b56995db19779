"""One checkpoint on disk: a directory of arrays, and a file that says what they are.

    checkpoint.json   every leaf's spec and CRC-32, and what goes with them; people can read it
    arrays/           the leaves, written by Orbax, flat, under the paths that messages use

Orbax checks its index and not the arrays: a bit that flips on a disk would come back as a weight.
So every leaf has a digest, and what is read is returned only if it has that digest still. A
CRC finds accidents, not attackers.
"""

import functools
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from functrain.checkpoint._about import ARRAYS, parsed, read_about, write_about
from functrain.checkpoint._arrays import (
    Stored,
    failing_to_write,
    release,
    save_options,
    turn_to_save,
)
from functrain.checkpoint._errors import CheckpointCorruptError
from functrain.checkpoint._leaves import Leaf, Parts, digest, is_stored, part, path_of
from functrain.common import _repr, _tree

# How many bytes are read at once: twice as many are in memory beside what was restored.
_AT_ONCE = 16 * 2**20
_SMALL = 2**20  # bytes of a file of arrays that gets a digest of its own
_EMPTY = "(empty)"  # the array of a checkpoint without any

# The arrays of documents may have so many bytes, ...
_DOCUMENTS = 64 * 2**20
_STATES = 4  # ... and so many times those of the state: EarlyStopping has a copy, ...
_COMPRESSION = 1000  # ... and so many times those on the disk: zeros compress 30,000 times.


def write(directory: str, leaves: Mapping[str, Leaf], about: Mapping[str, Any]) -> None:
    """Writes a checkpoint; its bytes are on the disk when it returns.

    Args:
      directory: A new one.
      leaves: By name.
      about: What goes with them, as JSON has it.

    Raises:
      OSError: It cannot be written; nothing of it is left.
    """
    from orbax.checkpoint import v1 as ocp

    os.makedirs(directory)
    try:
        with turn_to_save(), failing_to_write(directory), save_options():
            ocp.save(os.path.join(directory, ARRAYS), arrays_of(leaves))
        release(leaves)
        said = {n: said_of(leaf, digests(leaf)) for n, leaf in leaves.items()}
        write_about(directory, {**about, "files": file_digests(directory)}, said)
        sync_directory(directory)
    except Exception:  # after Ctrl-C Orbax is still writing: the next save removes what is left
        shutil.rmtree(directory, ignore_errors=True)  # a full disk needs the room
        raise


def arrays_of(leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """Returns what Orbax is to write, by name."""
    # It rejects arrays of size zero, of which the specs say all, and trees without leaves.
    arrays = {name: _as_stored(leaf.array) for name, leaf in leaves.items() if leaf.array.size}
    return arrays or {_EMPTY: np.zeros(1)}


def read_each(
    directory: str,
    about: Mapping[str, Any],
    blanks: Mapping[str, Callable[[], np.ndarray]],
    use: Callable[[str, Any], Any],
    own: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Reads leaves into host memory, some at a time, and compares their digests.

    Args:
      directory: The checkpoint.
      about: What it says of itself.
      blanks: For each leaf to read what returns an array of its shape and dtype.
      use: Called with each leaf and its name; only what it returns stays in memory.
      own: The places of the parts to read of a leaf, where that is not all of it: `use` gets
        `Parts`.

    Raises:
      CheckpointCorruptError: Names the leaves that cannot be read, or have other bytes.
    """
    stored, results, faults = _opened(directory, about), dict[str, Any](), list[str]()
    left = list(blanks)[::-1]
    while left:
        group, size = dict[str, np.ndarray](), 0
        while left and size < _AT_ONCE:
            name = left.pop()
            group[name] = blanks[name]()
            size += group[name].nbytes
        try:
            arrays = _read(directory, stored, about, group, own or {})
        except CheckpointCorruptError as error:
            faults.append(str(error))
            results.clear()
        else:
            for name in group:
                array = arrays.pop(name)
                if not faults:
                    results[name] = use(name, array)
                del array  # or the last one of this group stays while the next is read
    if faults:
        raise CheckpointCorruptError("\n".join(faults))
    return results


def _opened(directory: str, about: Mapping[str, Any]) -> Stored:
    names = [name for name, said in about["leaves"].items() if "crc32" in said]
    return Stored(directory, names or [_EMPTY])


def _read(
    directory: str,
    stored: Stored,
    about: Mapping[str, Any],
    blanks: Mapping[str, np.ndarray],
    own: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    leaves = about["leaves"]
    wanted = {name: blank for name, blank in blanks.items() if blank.size}
    likes = {name: _as_stored(blank) for name, blank in wanted.items()}
    found = stored.read(likes, {name: own[name] for name in likes if own.get(name)})
    for name, array in found.items():
        if not isinstance(array, Parts):
            found[name] = _as_it_was(array, wanted[name])
    wrong = [name for name in wanted if not is_as_saved(found[name], leaves[name]["crc32"])]
    if wrong:
        lines = [f"{path_of(name)}: {leaves[name]['spec']}" for name in wrong]
        raise CheckpointCorruptError(
            f"{directory}: these leaves are not what was saved, by their digests:\n"
            f"{_tree.bullets(lines)}\nThe checkpoint is damaged: take another."
        )
    return {name: found.get(name, blank) for name, blank in blanks.items()}


def verify(directory: str) -> None:
    """Reads all leaves of a checkpoint, some at a time, and all files; compares their digests.

    Raises:
      CheckpointMismatchError: There is none.
      CheckpointCorruptError: Names the files and leaves that cannot be read, or have other bytes.
    """
    about = read_about(directory)
    faults = _damaged_files(directory, about.get("files", {}))
    try:
        read_each(directory, about, blanks(about, about["leaves"]), lambda name, array: None)
    except CheckpointCorruptError as error:
        faults.append(str(error))
    if faults:
        raise CheckpointCorruptError("\n".join(faults))


def file_digests(directory: str) -> dict[str, str]:
    """Returns the size and the CRC-32 of each file that Orbax has written, by path.

    Of large files in a folder `d` the size alone: they hold arrays, whose leaves have digests.
    """
    top = os.path.join(directory, ARRAYS)
    digests = {}
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            size = os.path.getsize(path)
            crc32 = ""
            if size <= _SMALL or os.path.basename(folder) != "d":
                with open(path, "rb") as file:
                    crc32 = f" {zlib.crc32(file.read()):08x}"
            digests[os.path.relpath(path, top).replace(os.sep, "/")] = f"{size}{crc32}"
    return dict(sorted(digests.items()))


def _damaged_files(directory: str, saved: Mapping[str, str]) -> list[str]:
    """Returns a message about the files that are missing, or have other bytes, if there are any."""
    now = file_digests(directory) if saved else {}
    lines = [
        f"{ARRAYS}/{name}: {'other bytes' if name in now else 'missing'}"
        for name, digest in saved.items()
        if now.get(name) != digest
    ]
    if not lines:
        return []
    return [
        f"{directory}: these files are not what was saved:\n{_tree.bullets(lines)}\n"
        "What can be restored of it is right all the same, by digests of its own."
    ]


def bytes_of(directory: str) -> int:
    """Returns how many bytes the files of a directory have."""
    files = (os.path.join(at, name) for at, _, names in os.walk(directory) for name in names)
    return sum(os.lstat(file).st_size for file in files)


def _as_stored(array: Any) -> Any:
    """Returns what stands for an array in the file: itself, or its bytes in a last axis."""
    if is_stored(array.dtype):
        return array
    return np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint8)


def _as_it_was(stored: Any, like: np.ndarray) -> np.ndarray:
    """Undoes `_as_stored`."""
    found = np.asarray(stored)
    return found if is_stored(like.dtype) else found.view(like.dtype).reshape(like.shape)


def blanks(about: Mapping[str, Any], names: Iterable[str]) -> dict[str, Callable[[], np.ndarray]]:
    """Returns what makes arrays like those that stand for leaves in the file, without a state."""
    return {name: functools.partial(_blank, name, about["leaves"][name]) for name in names}


def _blank(name: str, record: Mapping[str, Any]) -> np.ndarray:
    """Returns an array like one that stands for a leaf in the file.

    Raises:
      CheckpointCorruptError: It is said to be larger than the memory.
    """
    dtype, shape = parsed(record.get("stored", record["spec"]))
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise CheckpointCorruptError(
            f"{path_of(name)}: expected an array that fits into memory, got {record['spec']}"
        ) from error


def require_sensible_size(
    directory: str, about: Mapping[str, Any], names: Iterable[str], state_bytes: int
) -> None:
    """Raises CheckpointCorruptError if arrays of documents would take more memory than they can.

    Nothing limits what a few compressed bytes may be said to be. Real documents hold a history,
    or copies of the state; only they are bounded, for the caller knows the size of its state.

    Args:
      directory: The checkpoint.
      about: What it says of itself.
      names: Those of the arrays.
      state_bytes: What is restored beside them.
    """
    records = [about["leaves"][name] for name in names]
    specs = [parsed(record.get("stored", record["spec"])) for record in records]
    size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs)
    most = _DOCUMENTS + _STATES * state_bytes + _COMPRESSION * bytes_of(directory)
    if size > most:
        raise CheckpointCorruptError(
            f"{directory}: expected documents of {_repr.size(most)} at the most beside this state, "
            f"got some that are said to be of {_repr.size(size)}. Nothing was read: take another."
        )


def digests(leaf: Leaf) -> dict[str, str]:
    """Returns the digests of a leaf's parts, by where they are."""
    return {place: digest(x) for place, x in leaf.parts.items() if x.size}


def said_of(leaf: Leaf, digests: Mapping[str, str]) -> dict[str, Any]:
    """Returns what is said of a leaf: what stands for it, if that is another; its digests."""
    stored = _tree.strong_spec(leaf.array)
    found = {"spec": leaf.spec, **({"stored": stored} if stored != leaf.spec else {})}
    if not digests:
        return found
    return {**found, "crc32": digests[""] if "" in digests else dict(sorted(digests.items()))}


def is_as_saved(array: np.ndarray | Parts, crc32: str | Mapping[str, str]) -> bool:
    """Compares an array with its digest, or with those of all its parts."""
    if isinstance(array, Parts):
        digests: Any = crc32
        return all(digest(x) == digests[place] for place, x in array.by_place.items())
    if isinstance(crc32, str):
        return digest(array) == crc32
    parts = [(part(array, place), said) for place, said in crc32.items()]
    whole = sum(found.size for found, _ in parts) == array.size
    return whole and all(digest(found) == said for found, said in parts)


def sync_directory(path: str) -> None:
    """Brings a directory's names to the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
