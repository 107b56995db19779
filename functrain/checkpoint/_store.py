"""One checkpoint on disk: a directory of arrays, and a file that says what they are.

    checkpoint.json   every leaf's spec and CRC-32, and what goes with them; people can read it
    arrays/           the leaves, written by Orbax, flat, under the paths that messages use

Orbax checks its index and not the arrays: a bit that flips on a disk would come back as a weight.
So every leaf has a digest, and what is read is returned only if it has that digest still. A
CRC finds accidents, not attackers.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
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
from functrain.checkpoint._leaves import Leaf, digest, is_stored, part, path_of
from functrain.common import _tree

# How much is read at once where all of a checkpoint is, to compare digests.
_AT_ONCE = 64 * 2**20
_EMPTY = "(empty)"  # the array of a checkpoint without any


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
        write_about(directory, about, said)
        sync_directory(directory)
    except Exception:  # after Ctrl-C Orbax is still writing: the next save removes what is left
        shutil.rmtree(directory, ignore_errors=True)  # a full disk needs the room
        raise


def arrays_of(leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """Returns what Orbax is to write, by name."""
    # It rejects arrays of size zero, of which the specs say all, and trees without leaves.
    arrays = {name: _as_stored(leaf.array) for name, leaf in leaves.items() if leaf.array.size}
    return arrays or {_EMPTY: np.zeros(1)}


def read_arrays(
    directory: str, about: Mapping[str, Any], blanks: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Reads leaves into host memory, and compares their digests.

    Args:
      directory: The checkpoint.
      about: What it says of itself.
      blanks: For each leaf to read an array of its shape and dtype.

    Raises:
      CheckpointCorruptError: Names the leaves that cannot be read, or have other bytes.
    """
    if not any(blank.size for blank in blanks.values()):
        return dict(blanks)
    return _read(directory, _opened(directory, about), about, blanks)


def _opened(directory: str, about: Mapping[str, Any]) -> Stored:
    names = [name for name, said in about["leaves"].items() if "crc32" in said]
    return Stored(directory, names or [_EMPTY])


def _read(
    directory: str, stored: Stored, about: Mapping[str, Any], blanks: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    leaves = about["leaves"]
    wanted = {name: blank for name, blank in blanks.items() if blank.size}
    arrays = stored.read({name: _as_stored(blank) for name, blank in wanted.items()})
    found = {name: _as_it_was(array, wanted[name]) for name, array in arrays.items()}
    wrong = [name for name in wanted if not is_as_saved(found[name], leaves[name]["crc32"])]
    if wrong:
        lines = [f"{path_of(name)}: {leaves[name]['spec']}" for name in wrong]
        raise CheckpointCorruptError(
            f"{directory}: these leaves are not what was saved, by their digests:\n"
            f"{_tree.bullets(lines)}\nThe checkpoint is damaged: take another."
        )
    return {name: found.get(name, blank) for name, blank in blanks.items()}


def verify(directory: str) -> None:
    """Reads all leaves of a checkpoint, some at a time, and compares their digests.

    Raises:
      CheckpointMismatchError: There is none.
      CheckpointCorruptError: Names the leaves that cannot be read, or have other bytes.
    """
    about = read_about(directory)
    stored = _opened(directory, about)
    left, faults = list(about["leaves"]), []
    while left:
        group, size = dict[str, np.ndarray](), 0
        while left and size < _AT_ONCE:
            name = left.pop()
            group.update(blanks(about, [name]))
            size += group[name].nbytes
        try:
            _read(directory, stored, about, group)
        except CheckpointCorruptError as error:
            faults.append(str(error))
    if faults:
        raise CheckpointCorruptError("\n".join(faults))


def _as_stored(array: Any) -> Any:
    """Returns what stands for an array in the file: itself, or its bytes in a last axis."""
    if is_stored(array.dtype):
        return array
    return np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint8)


def _as_it_was(stored: Any, like: np.ndarray) -> np.ndarray:
    """Undoes `_as_stored`."""
    found = np.asarray(stored)
    return found if is_stored(like.dtype) else found.view(like.dtype).reshape(like.shape)


def blanks(about: Mapping[str, Any], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns arrays like those that stand for leaves in the file, to read without a state.

    Raises:
      CheckpointCorruptError: One is said to be larger than the memory.
    """
    found = {}
    for name in names:
        said = about["leaves"][name]
        dtype, shape = parsed(said.get("stored", said["spec"]))
        try:
            found[name] = np.empty(shape, dtype)
        except (MemoryError, ValueError) as error:
            raise CheckpointCorruptError(
                f"{path_of(name)}: expected an array that fits into memory, got {said['spec']}"
            ) from error
    return found


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


def is_as_saved(array: np.ndarray, crc32: str | Mapping[str, str]) -> bool:
    """Compares an array with its digest, or with those of all its parts."""
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
