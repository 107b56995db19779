"""The files of checkpoints: their names, and access to them on disk.

    checkpoint.json                  the manifest: what each leaf is, and where its bytes are
    arrays-0-5f3a91c2.safetensors    the leaves, or those parts of them that process 0 has

A directory is a checkpoint if it has a manifest, which is written last, in one operation. It names
the save whose arrays belong to it, and array files have the random id of their save in their names.
So to replace a checkpoint is to replace its manifest, and to remove it is to remove its manifest;
array files that no manifest needs are deleted afterwards. A kill at any moment leaves each
checkpoint complete or absent. The same holds in an object store, see `_object_store`.
"""

import contextlib
import glob
import io
import os
import re
from collections.abc import Iterable, Iterator
from typing import IO

from functrain.checkpoint._object_store import PACKAGES, ObjectStore
from functrain.common import _locks
from functrain.common._checks import require
from functrain.common._paths import path_text

MANIFEST = "checkpoint.json"
_NEW_MANIFEST = f"{MANIFEST}.new"


def arrays_name(process: int, save_id: str) -> str:
    """Returns the name of the file with the arrays of a process."""
    return f"arrays-{process:d}-{save_id}.safetensors"


def is_part(name: str) -> bool:
    """Returns True for a file that is nothing without a manifest."""
    is_arrays = re.fullmatch(r"arrays-\d+-[0-9a-f]+\.safetensors", name)
    return is_arrays is not None or name == _NEW_MANIFEST


def is_step_name(name: str) -> bool:
    """Returns True if a name is that of a step's checkpoint: twelve digits."""
    return len(name) == 12 and name.isascii() and name.isdigit()


def steps_in(names: Iterable[str]) -> list[int]:
    """Returns the steps that have a checkpoint among the names of a directory, ascending."""
    folders = map(os.path.split, names)
    return sorted(int(x) for x, name in folders if name == MANIFEST and is_step_name(x))


def resolve_path(
    path: str | os.PathLike[str], name: str = "path", *, is_written: bool = True
) -> str:
    """Returns a URL, or an absolute path that later changes of links leave alone.

    What is only read may be at any URL for which fsspec has access.
    """
    text = path_text(path, name)
    expected = "a path on this machine, such as 'runs/first' or '.', or a URL of gs:// or s3://"
    url = re.match(r"(\w\w+)?:/(/?)(.*)", text)
    is_store = url is not None and bool(url[1] in PACKAGES or (url[1] and not is_written))
    is_known = url is None or (is_store and url[2] and url[3])
    advice = "Mount other storage as a folder. A pathlib.Path removes a slash: pass a text."
    require(is_known, name, expected, text, advice)
    if url is not None:
        return text.rstrip("/")
    if is_written or not os.path.isfile(text):
        return os.path.realpath(text)
    # The name of a file says its format: what a link leads to, as in caches, may have none.
    folder, name = os.path.split(text)
    return os.path.join(os.path.realpath(folder), name)


def files_at(path: str) -> "Disk | ObjectStore":
    """Returns access to the files at a path that `resolve_path` returned.

    Raises ImportError if the library for a URL is not installed.
    """
    return ObjectStore(path) if "://" in path else Disk()


class Disk:
    """Files on disk. Paths are absolute."""

    def names(self, directory: str) -> set[str]:
        """Returns the names of the files in a directory, and of those in its folders of steps.

        Of an empty folder it returns the name of the folder, and of a file {""}.
        """
        try:
            listed = {entry.name: entry for entry in os.scandir(directory)}
        except FileNotFoundError:
            return set()
        except NotADirectoryError:
            return {""} if os.path.lexists(directory) else set()
        # A link may lead anywhere.
        folders = [name for name, entry in listed.items() if entry.is_dir(follow_symlinks=False)]
        # The oldest first: a writer removes one after it has written a newer one.
        steps = sorted(filter(is_step_name, folders))
        names = set(listed).difference(steps)
        for step in steps:
            in_folder = self.names(os.path.join(directory, step))
            names |= {f"{step}/{name}" for name in in_folder} or {step}
        # If a newer one has come meanwhile, those that were listed may be gone.
        if steps and any(is_step_name(x) and x not in listed for x in os.listdir(directory)):
            return self.names(directory)
        return names

    def find(self, directory: str, pattern: str) -> list[str]:
        """Returns the names below a directory that match a pattern such as ``*/a.json``, sorted."""
        return sorted(glob.glob(pattern, root_dir=directory))

    def has(self, directory: str, names: list[str]) -> bool:
        """Returns True if a directory has all of these files."""
        # Looked up by name, because network disks cache the listings of other hosts' files.
        return all(os.path.lexists(os.path.join(directory, name)) for name in names)

    def open(self, path: str) -> io.FileIO:
        """Opens a file for reading."""
        return open(path, "rb", buffering=0)

    def errors(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager for reading from open files, whose errors are clear."""
        return contextlib.nullcontext()

    def read(self, path: str) -> bytes:
        """Returns the bytes of a file."""
        with self.open(path) as file:
            return file.read()

    def make_directory(self, path: str) -> None:
        """Creates a directory; raises FileExistsError for a file or a link in its place."""
        try:
            os.makedirs(path, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise FileExistsError(
                f"{path}: expected a directory, got a file or a link of this name, or of a "
                "folder above. Remove it, or choose another path."
            ) from error
        if os.path.islink(path):
            raise FileExistsError(f"{path}: expected a directory, got a link. Remove it.")

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[IO[bytes]]:
        """Context manager: a file to write, whose bytes are on disk at the end."""
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def replace(self, path: str, content: bytes) -> None:
        """Writes a file in one operation."""
        directory, new_path = os.path.dirname(path), f"{path}.new"
        with self.create(new_path) as file:
            file.write(content)
        os.replace(new_path, path)
        _sync_directory(directory)
        _sync_directory(os.path.dirname(directory))

    def delete(self, directory: str, names: list[str]) -> None:
        """Deletes files in this order, and then the directory if nothing else is in it."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(directory, name))
        # NFS keeps a file that is open under another name: the next writer removes the directory.
        with contextlib.suppress(OSError):
            os.rmdir(directory)

    def move(self, directory: str, new_directory: str) -> None:
        """Renames a directory."""
        os.rename(directory, new_directory)

    def lock(self, directory: str) -> _locks.Lock:
        """Returns the lock of the one writer of a directory."""
        return _locks.Lock(os.path.join(directory, ".functrain-lock"))


def _sync_directory(directory: str) -> None:
    """Flushes the names in a directory to disk, where the system can."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        handle = os.open(directory, os.O_RDONLY)
        # Some network file systems cannot flush directories.
        with contextlib.suppress(OSError):
            os.fsync(handle)
        os.close(handle)
