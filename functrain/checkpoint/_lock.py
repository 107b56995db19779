"""Locks of writers, which who ends, however that is, lets go of."""

import contextlib
import os
import weakref
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class Lock:
    """A lock on a directory, by a file in it.

    It is the open file that holds the lock: a process that is killed, and a lock that nobody
    refers to any more, let go. A forked child has no part in it.

    Args:
      path: Of the file. It stays when the lock is let go: to remove it would let two writers in.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._close: weakref.finalize[[int], Lock] | None = None
        self._handle = -1

    def is_held(self) -> bool:
        """Whether it is held here, and the file is still there that others would ask."""
        with contextlib.suppress(OSError):
            return self._close is not None and os.path.samefile(self._path, self._handle)
        return False

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
          RuntimeError: Somebody else holds it.
          OSError: The file cannot be written.
        """
        self.release()
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
        try:
            _take(handle, os.path.dirname(self._path))
        except BaseException:
            os.close(handle)
            raise
        self._handle, self._close = handle, weakref.finalize(self, os.close, handle)
        _held.add(self)
        with contextlib.suppress(OSError):  # on a full disk it has no name to tell
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


def _take(handle: int, directory: str) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        writer = os.pread(handle, 100, 0).decode(errors="replace") or "another process"
        if writer == f"process {os.getpid()}":
            writer = "another Checkpointer of this process, which close() would end,"
        raise RuntimeError(
            f"{directory}: expected to be the only one who writes here, but {writer} does. "
            "Wait for its end, or take another directory."
        ) from None


_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _let_go_in_a_child() -> None:
    """Closes what a child got of its parent, whose lock would else outlive the parent in it."""
    for lock in list(_held):
        lock.release(for_all=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_a_child)


@contextlib.contextmanager
def alone(directory: str) -> Iterator[None]:
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
