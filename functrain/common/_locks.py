"""File locks, which the system releases when a process ends, however it ends."""

import contextlib
import os
import weakref
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Lock:
    """A lock on a directory for its one writer, by a file in it.

    It is the open file that holds the lock: a process that is killed, and a lock that nobody
    refers to any more, let go. A forked child has no part in it. The file stays: to remove it
    would let two writers in.
    """

    def __init__(self, path: str) -> None:
        self._path, self._handle = path, -1
        self._close: weakref.finalize[[int], Lock] | None = None

    def is_held(self) -> bool:
        """Returns True if it is held here, and the file is still there that others would ask."""
        with contextlib.suppress(OSError):
            return self._close is not None and os.path.samefile(self._path, self._handle)
        return False

    def acquire(self) -> None:
        """Takes the lock; raises a RuntimeError if somebody else holds it."""
        self.release()
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(self._path, flags, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            writer = os.read(handle, 100).decode(errors="replace") or "another process"
            os.close(handle)
            if writer == f"process {os.getpid()}":
                writer = "another writer of this process, which close() would end,"
            raise RuntimeError(
                f"{os.path.dirname(self._path)}: expected to be the only one who writes here, but "
                f"{writer} does. Wait for its end, or take another directory."
            ) from None
        self._handle, self._close = handle, weakref.finalize(self, os.close, handle)
        _held.add(self)
        with contextlib.suppress(OSError):  # a full disk has no room for the name
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()}".encode())

    def release(self, *, for_all: bool = True) -> None:
        """Lets it go; a child that only closes what it got leaves it to its parent."""
        _held.discard(self)
        if self._close is not None:
            if for_all and fcntl is not None and self._close.alive:
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # a child may not have let go yet
            self._close()
        self._close = None


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _let_go_in_a_child() -> None:
    """Closes what a child got of its parent, whose lock would else outlive the parent in it."""
    for lock in list(_held):
        lock.release(for_all=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_a_child)


@contextlib.contextmanager
def exclusive_access(directory: str) -> Iterator[None]:
    """Waits until no other process of this machine puts anything into a directory."""
    if fcntl is None:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system locks directories
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
