"""The files of checkpoints in an object store, such as ``gs://bucket/run``, through fsspec.

An object appears complete or not at all, as `Disk.replace` writes a file. There are no locks: the
newest writer of a directory leaves a record in it, and others find it before they commit.
"""

import contextlib
import errno
import functools
import glob
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from functrain.checkpoint._errors import ObjectStoreError
from functrain.common._library import import_optional
from functrain.common._locks import advice_to_connect

# Larger requests are faster, but this memory is taken beside a leaf. S3 allows 10,000 parts.
_READ_BYTES, _WRITE_BYTES = 16 * 2**20, 64 * 2**20

# By protocol, of stores that checkpoints are written to.
PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "memory": "fsspec"}


@functools.cache
def _file_system(protocol: str, package: str, process: int) -> Any:
    """Returns fsspec's access to a store. A forked child needs its own connections."""
    to_install = f"paths with {protocol}:// need {package}: pip install 'functrain[remote]'"
    fsspec = import_optional("fsspec", to_install)
    import_optional(package, to_install)
    # Another process may change the listings at any time. fsspec's own instances are those of
    # one thread, and every save has its own.
    try:
        return fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True)
    except ValueError as error:
        raise ValueError(
            f"{protocol}://: expected a protocol that fsspec knows, such as gs://, s3:// or hf://."
        ) from error


@contextlib.contextmanager
def _store_errors(path: str) -> Iterator[None]:
    """Context manager that turns the many errors of clients into ObjectStoreErrors.

    So a store that cannot be reached is not taken for a damaged checkpoint. A missing object is a
    FileNotFoundError.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such object or bucket", path) from error
    except Exception as error:
        answer = str(error)[:500].rstrip(".")
        raise ObjectStoreError(
            f"{path}: expected an object store that grants the request, got "
            f"{type(error).__name__}: {answer}. Check the bucket, the permissions and the network."
        ) from error


class ObjectStore:
    """The operations of `Disk`, in an object store. Paths are URLs."""

    errors = staticmethod(_store_errors)

    def __init__(self, path: str) -> None:
        protocol = path.partition("://")[0]
        self._store = _file_system(protocol, PACKAGES.get(protocol, "fsspec"), os.getpid())

    def names(self, directory: str) -> set[str]:
        """Returns the names of the objects below a path; "" is the path itself."""
        with _store_errors(directory):
            root = self._store._strip_protocol(directory)
            return {name.removeprefix(root).lstrip("/") for name in self._store.find(directory)}

    def find(self, directory: str, pattern: str) -> list[str]:
        """Returns the names below a path that match a pattern such as ``*/a.json``, sorted."""
        with _store_errors(directory):
            root = self._store._strip_protocol(directory)
            names = self._store.glob(f"{glob.escape(root)}/{pattern}")
        return sorted(name.removeprefix(root).lstrip("/") for name in names)

    def has(self, directory: str, names: list[str]) -> bool:
        """Returns True if a directory has all of these objects."""
        return self.names(directory).issuperset(names)

    def open(self, path: str) -> Any:
        """Opens an object for reading, within `errors`. Requests are for ranges of it."""
        return self._store.open(path, "rb", block_size=_READ_BYTES, cache_type="readahead")

    def read(self, path: str) -> bytes:
        """Returns the bytes of an object."""
        with _store_errors(path):
            return bytes(self._store.cat_file(path))

    def make_directory(self, path: str) -> None:
        """Does nothing, because directories are only parts of names."""

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[Any]:
        """Context manager: a new object for writing, which appears at the end."""
        # If its writer fails, fsspec completes the object. No manifest names it, so the save or the
        # next writer deletes it.
        options = {"mode": "wb", "block_size": _WRITE_BYTES}
        with _store_errors(path), self._store.open(path, **options) as file:
            yield file

    def replace(self, path: str, content: bytes) -> None:
        """Writes an object in one operation."""
        with _store_errors(path):
            self._store.pipe_file(path, content)

    def delete(self, directory: str, names: list[str]) -> None:
        """Deletes objects in this order."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), _store_errors(directory):
                self._store.rm_file(f"{directory}/{name}")

    def move(self, directory: str, new_directory: str) -> None:
        """Moves the objects below a path."""
        for name in self.names(directory):
            with _store_errors(directory):
                self._store.mv(f"{directory}/{name}", f"{new_directory}/{name}")

    def lock(self, directory: str) -> "_Owner":
        """Returns the record of the newest writer of a directory."""
        return _Owner(f"{directory}/.functrain-writer")


class _Owner:
    """A record of the newest writer of a directory, in place of a lock.

    A lock would have to be removed by hand after each kill. A writer that begins replaces the
    record instead, and the one before finds that out when it saves.
    """

    def __init__(self, path: str) -> None:
        self._path, self._record = path, b""

    def is_held(self) -> bool:
        """Returns True if this is the writer; raises RuntimeError if another has taken over."""
        with contextlib.suppress(FileNotFoundError):  # it was deleted with the directory
            stored = ObjectStore(self._path).read(self._path) if self._record else b""
            if stored != self._record:
                writer = stored.decode(errors="replace").partition("#")[0]
                raise RuntimeError(
                    f"{os.path.dirname(self._path)}: expected to be the only writer of this "
                    f"directory, but {writer} has taken over. Nothing was saved. Use another "
                    "directory, or end that process, call close(), and save again."
                    f"{advice_to_connect()}"
                )
        return self._record != b""

    def acquire(self) -> None:
        """Becomes the writer; raises ObjectStoreError if the store cannot be written."""
        record = f"process {os.getpid()} on {socket.gethostname()}#{secrets.token_hex(8)}"
        self._record = record.encode()
        ObjectStore(self._path).replace(self._path, self._record)

    def release(self) -> None:
        """Ends the writing. The record stays, and the next writer replaces it."""
        self._record = b""
