"""Checkpoints on disk: names, complete directories, and the lock of their writer.

A checkpoint is written beside its target under a temporary name, and renamed when it is complete.
"""

import contextlib
import errno
import io
import os
import re
import shutil
import stat
from collections.abc import Iterator
from typing import IO

from functrain.common import _locks
from functrain.common._warnings import warn

MANIFEST = "checkpoint.json"
LOCK_FILE = ".functrain-lock"
_NEW, _OLD, _DELETED = ".functrain-new", ".functrain-old", ".functrain-gone"


def arrays_name(process: int, save_id: str = "") -> str:
    """Returns the name of the file with the arrays of a process; see `RemoteFiles` for the id."""
    return f"arrays-{process:d}{save_id and f'-{save_id}'}.safetensors"


def is_arrays_name(name: str) -> bool:
    """Returns True if `arrays_name` makes this name."""
    return re.fullmatch(r"arrays-\d+(-[0-9a-f]+)?\.safetensors", name) is not None


def is_step_name(name: str) -> bool:
    """Returns True if a name is that of a step's checkpoint: twelve digits."""
    return len(name) == 12 and name.isascii() and name.isdigit()


class LocalFiles:
    """The operations on checkpoints that depend on where they are. Paths are absolute."""

    # Reading.

    def open(self, path: str) -> io.FileIO:
        """Opens a file for reading; raises OSError for a pipe or a link."""
        # A link may lead to any file of the user, and a pipe would block without O_NONBLOCK.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        handle = os.open(path, flags | getattr(os, "O_BINARY", 0))
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(0, "not a regular file", path)
        return open(handle, "rb", buffering=0)

    def exists(self, path: str) -> bool:
        """Returns True if anything is at a path."""
        return os.path.lexists(path)

    def is_directory(self, path: str) -> bool:
        """Returns True if a directory is at a path."""
        return os.path.isdir(path)

    def is_checkpoint(self, directory: str) -> bool:
        """Returns True if a directory is a checkpoint, intact or damaged."""
        # A link may lead anywhere, and what it leads to may change.
        if os.path.islink(directory):
            return False
        # A checkpoint that lost one of the two is a damaged checkpoint.
        for name in (MANIFEST, arrays_name(0)):
            # os.path.lexists would return False where access is denied.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(os.path.join(directory, name))
                return True
        return False

    def steps(self, directory: str) -> list[int]:
        """Returns the steps that have a checkpoint, in ascending order."""
        if not os.path.isdir(directory):
            return []
        steps = set()
        for name in os.listdir(directory):
            # If a replacement was interrupted, only the old checkpoint is there, under this name.
            step_name = name.removesuffix(_OLD)
            path = os.path.join(directory, name)
            if not is_step_name(step_name):
                continue
            if self.is_checkpoint(path):
                steps.add(int(step_name))
            elif not os.path.lexists(path):
                return self.steps(directory)  # the writer has replaced it since the listing
        return sorted(steps)

    def find(self, target: str, expected: str = "a checkpoint") -> str:
        """Returns the target, or the old one beside it if a replacement was interrupted."""
        if os.path.lexists(target):
            return target
        if not self.is_checkpoint(target + _OLD):
            raise FileNotFoundError(f"{target}: expected {expected}, got nothing. Check the path.")
        warn(
            f"{target}: expected a checkpoint, got nothing: a save was interrupted while it "
            "replaced this checkpoint. The previous one was kept, and is loaded: "
            f"{target + _OLD}. The next save cleans up.",
        )
        return target + _OLD

    def identity(self, target: str) -> object:
        """Returns a value that changes when the checkpoint at a path is removed or replaced."""
        identities = {}
        for path in (target, target + _OLD):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                # Inode numbers are reused, so the mtime is part of the identity.
                identities[path] = status.st_dev, status.st_ino, status.st_mtime_ns
        return identities

    def size(self, directory: str) -> int:
        """Returns the number of bytes of a checkpoint."""
        files = os.scandir(directory)
        return sum(file.stat(follow_symlinks=False).st_size for file in files)

    # Writing one checkpoint.

    @contextlib.contextmanager
    def taking_turns(self, target: str) -> Iterator[None]:
        """Context manager: two processes that save to one path take turns."""
        with _locks.exclusive_access(os.path.dirname(target)):
            yield

    def is_free(self, target: str) -> bool:
        """Returns True if nothing is at a path that a save would destroy."""
        return not os.path.lexists(target)

    def begin(self, target: str) -> str:
        """Makes room for a new checkpoint. Returns an id that all processes pass on."""
        self.remove(target + _NEW)  # left by a save that was killed
        os.makedirs(target + _NEW)
        return ""

    def has_begun(self, target: str) -> bool:
        """Returns True if this process can see what `begin` made."""
        return os.path.isdir(target + _NEW)

    @contextlib.contextmanager
    def create(self, target: str, name: str) -> Iterator[IO[bytes]]:
        """Context manager: a new file of a checkpoint, whose bytes are on disk at the end."""
        with open(os.path.join(target + _NEW, name), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def commit(self, target: str, manifest: bytes, names: list[str]) -> None:
        """Moves the new checkpoint to its target. At any moment the old or the new is complete."""
        with self.create(target, MANIFEST) as file:
            file.write(manifest)
        # All bytes are on disk before the checkpoint gets its name.
        _sync_directory(target + _NEW)
        # Not every system can replace a directory in one operation: the old one is kept beside the
        # target until the new one is in place. If a kill interrupts this, the old one is loaded.
        if os.path.lexists(target):
            self.remove(target + _OLD)
            os.rename(target, target + _OLD)
        os.rename(target + _NEW, target)
        _sync_directory(os.path.dirname(target))
        self.remove(target + _OLD)

    def abort(self, target: str, save_id: str) -> None:
        """Removes a checkpoint that could not be written: a full disk needs the space."""
        shutil.rmtree(target + _NEW, ignore_errors=True)
        # Ctrl-C may have come between the two renames of `commit`.
        self.undo_interrupted_replace(target)

    # A directory of checkpoints, and its one writer.

    def require_directory(self, path: str) -> None:
        """Raises FileExistsError if something else than a directory is at a path."""
        if os.path.lexists(path) and not os.path.isdir(path):
            raise FileExistsError(
                f"{path}: expected a directory for checkpoints, got a file. Choose another path."
            )

    def make_directory(self, path: str) -> None:
        """Creates a directory for checkpoints."""
        os.makedirs(path, exist_ok=True)

    def lock(self, directory: str) -> _locks.Lock:
        """Returns the lock of the writer of a directory."""
        return _locks.Lock(os.path.join(directory, LOCK_FILE))

    def remove(self, path: str) -> None:
        """Removes a checkpoint. A kill leaves it complete, or not under its name."""
        # It is renamed first: a kill in the middle would leave a part of it under its name.
        shutil.rmtree(path + _DELETED, ignore_errors=True)
        if os.path.lexists(path):
            os.rename(path, path + _DELETED)
            # What cannot be deleted now, such as an open file on NFS, is left to the next writer.
            shutil.rmtree(path + _DELETED, ignore_errors=True)

    def remove_step(self, target: str) -> None:
        """Removes the checkpoint of a step, and an older one that was kept beside it."""
        # Otherwise the next cleaning would bring the old one back.
        self.undo_interrupted_replace(target)
        self.remove(target)

    def set_aside(self, target: str, new_path: str) -> None:
        """Renames a damaged checkpoint, if that is possible."""
        self.remove(new_path)
        with contextlib.suppress(OSError):
            os.rename(target, new_path)

    def clean_up(self, directory: str) -> None:
        """Removes what interrupted saves of steps left, and restores what they had moved away."""
        # A save would replace, and `keep` remove, whatever has the name of a step.
        for entry in list(os.scandir(directory)):
            if is_step_name(entry.name):
                self._require_replaceable(entry)
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            if not is_step_name(name.partition(".")[0]):
                continue
            if name.endswith(_OLD):
                self.undo_interrupted_replace(path.removesuffix(_OLD))
                self.remove(path)
            elif name.endswith((_NEW, _DELETED)):
                shutil.rmtree(path, ignore_errors=True)

    def _require_replaceable(self, entry: os.DirEntry[str]) -> None:
        """Raises FileExistsError if something else than a checkpoint has the name of a step."""
        is_folder = entry.is_dir(follow_symlinks=False)
        is_empty_folder = is_folder and not os.listdir(entry.path)
        if not is_empty_folder and not self.is_checkpoint(entry.path):
            content = "folder of something else" if is_folder else "file or link"
            raise FileExistsError(
                f"{entry.path}: expected a checkpoint, got a {content} under the name of a step. "
                "Move it away."
            )

    def undo_interrupted_replace(self, target: str) -> None:
        """Moves the old checkpoint back if a replacement ended between its two renames."""
        if self.is_checkpoint(target + _OLD) and not os.path.lexists(target):
            os.rename(target + _OLD, target)


def _sync_directory(directory: str) -> None:
    """Flushes the names in a directory to disk, where the system can."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network file systems cannot flush directories.
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
                raise
        finally:
            os.close(handle)
