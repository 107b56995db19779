"""File locks. The OS releases them when the process ends, even if it is killed."""

import contextlib
import errno
import os
import weakref
from collections.abc import Iterator

import jax

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


# What `flock` fails with on file systems that have no locks, such as some of FUSE and Lustre.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Lock:
    """An exclusive lock for the one writer of a directory, held through a file in it.

    The open file holds the lock: if the process is killed, or the object is garbage-collected, the
    file is closed and the lock released. Forked children do not share the lock. The lock file is
    never removed: a second writer could then create and lock another file of the same name. Where
    the file system has no locks, a second writer is not noticed.
    """

    def __init__(self, path: str) -> None:
        self._path, self._handle = path, -1
        # Closes the file; None while the lock is not held.
        self._close: weakref.finalize[[int], Lock] | None = None

    def is_held(self) -> bool:
        """Returns True if this object holds the lock and the lock file still exists.

        If the file was deleted or replaced, other processes would lock a different file.
        """
        with contextlib.suppress(OSError):
            return self._close is not None and os.path.samefile(self._path, self._handle)
        return False

    def acquire(self) -> None:
        """Acquires the lock; raises RuntimeError if another writer holds it."""
        self.release()
        # O_NOFOLLOW, which Windows lacks: a symbolic link here could name a file to be overwritten.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(self._path, flags, 0o666)
        self._handle, self._close = handle, weakref.finalize(self, os.close, handle)
        _held_locks.add(self)
        try:
            if fcntl is not None:
                _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            writer = os.read(handle, 100).decode(errors="replace") or "another process"
            self.release(for_all=False)
            if writer == f"process {os.getpid()}":
                writer = "another writer in this process"
            raise RuntimeError(
                f"{os.path.dirname(self._path)}: expected to be the only writer of this directory, "
                f"but {writer} is writing to it. Wait until it has finished, call its close(), or "
                f"choose another directory.{advice_to_connect()}"
            ) from None
        # The name is for the error above only: do without it if the disk is full.
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()}".encode())

    def release(self, *, for_all: bool = True) -> None:
        """Releases the lock.

        Args:
          for_all: False closes this process's copy of the file only, so that the parent of a
            forked child keeps the lock.
        """
        _held_locks.discard(self)
        if self._close is not None:
            # A forked child may still have the file open, and closing it here would not unlock it.
            if for_all and fcntl is not None and self._close.alive:
                _flock(self._handle, fcntl.LOCK_UN)
            self._close()
        self._close = None


def advice_to_connect() -> str:
    """Returns advice, after a space, for one of several processes that does not know the others."""
    count = os.environ.get("JAX_NUM_PROCESSES", "1")  # set by functrain.launch
    if count == "1" or jax.distributed.is_initialized():
        return ""
    return (
        f" This process was started as one of {count}, but runs alone: call "
        "functrain.distributed.initialize() at the start of the script."
    )


def _flock(handle: int, operation: int) -> None:
    """Locks or unlocks a file, where the file system can."""
    try:
        fcntl.flock(handle, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


_held_locks: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Closes the lock files that a forked child inherited.

    An open copy would keep the lock after the parent has ended.
    """
    for lock in list(_held_locks):
        lock.release(for_all=False)


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def exclusive_access(directory: str) -> Iterator[None]:
    """Context manager: waits until no other process of this machine is in this block.

    Args:
      directory: The block is exclusive for this directory.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        # Some file systems cannot lock directories: go without the lock there.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # A forked child may still have the directory open, and closing it would not unlock it.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
