"""Checkpoints in an object store, such as ``gs://bucket/run``, through fsspec.

An object appears complete or not at all, but it cannot be renamed, and there are no locks. So:

- The manifest is uploaded last. A checkpoint exists if it has a manifest.
- The names of array files contain an id of the save. To replace a checkpoint is to replace its
  manifest, which is one operation; the files of the old one are deleted afterwards.
- What killed saves left, which no manifest names, is deleted when the next writer begins.
- The newest writer of a directory leaves a record in it. Others find it before they commit.
"""

import contextlib
import datetime
import errno
import functools
import json
import os
import re
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from functrain.checkpoint._errors import ObjectStoreError
from functrain.checkpoint._local import MANIFEST, LocalFiles, is_arrays_name, is_step_name
from functrain.common._checks import require
from functrain.common._library import import_optional
from functrain.common._paths import path_text

# The package of each protocol that fsspec knows and that is tested here.
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "memory": "fsspec"}
_OWNER_FILE = ".functrain-writer"
# Larger requests are faster, but this memory is taken beside a leaf. S3 allows 10,000 parts.
_READ_BYTES, _WRITE_BYTES = 16 * 2**20, 64 * 2**20


def resolve_path(path: str | os.PathLike[str], name: str = "path") -> str:
    """Returns a URL, or an absolute path that later changes of links leave alone."""
    advice = "The path comes first: save(path, state), load(path, like)." if name == "path" else ""
    text = path_text(path, name, advice)
    known = " or ".join(f"{protocol}://" for protocol in _PACKAGES if protocol != "memory")
    expected = f"a path on this machine, such as 'runs/first' or '.', or a URL of {known}"
    advice = "Mount other storage as a folder, or copy the files."
    if re.match(rf"({'|'.join(_PACKAGES)}):/[^/]", text):
        require(False, name, expected, text, "pathlib removes a slash from URLs: pass a text.")
    protocol, is_url, rest = text.partition("://")
    require(not is_url or (protocol in _PACKAGES and rest), name, expected, text, advice)
    return text.rstrip("/") if is_url else os.path.realpath(text)


def files_at(path: str) -> "LocalFiles | RemoteFiles":
    """Returns the operations on checkpoints at a path that `resolve_path` returned."""
    return RemoteFiles() if "://" in path else LocalFiles()


@functools.cache
def _file_system(protocol: str, process: int) -> Any:
    """Returns fsspec's access to a store. A forked child needs its own connections."""
    package = _PACKAGES[protocol]
    to_install = f"paths with {protocol}:// need {package}: pip install 'functrain[remote]'"
    fsspec = import_optional("fsspec", to_install)
    import_optional(package, to_install)
    # Another process may change the listings at any time. fsspec's own instances are those of
    # one thread, and every save has its own.
    return fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True)


@contextlib.contextmanager
def _store(path: str) -> Iterator[Any]:
    """Context manager: the file system of a URL, whose many errors become ObjectStoreErrors.

    So a store that cannot be reached is not taken for a damaged checkpoint. A missing object is a
    FileNotFoundError.
    """
    try:
        yield _file_system(path.partition("://")[0], os.getpid())
    except (ImportError, ObjectStoreError):
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such object or bucket", path) from error
    except Exception as error:
        answer = str(error)[:500].rstrip(".")
        raise ObjectStoreError(
            f"{path}: expected an object store that grants the request, got "
            f"{type(error).__name__}: {answer}. Check the name of the bucket, the "
            "credentials, their permissions, and the network."
        ) from error


class _Object(contextlib.AbstractContextManager["_Object"]):
    """An object that is open for reading or writing. Closing it completes what was written."""

    def __init__(self, path: str, mode: str, block_size: int) -> None:
        self._path = path
        with _store(path) as store:
            self._file = store.open(path, mode, block_size=block_size, cache_type="readahead")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None or self._file.readable():
            self.close()
            return
        # fsspec's own method would complete an object whose writer has failed.
        with contextlib.suppress(Exception):
            self._file.discard()
            self._file.closed = True

    def close(self) -> None:
        """Completes what was written."""
        with _store(self._path):
            self._file.close()

    def read(self, size: int = -1) -> bytes:
        """Returns the next bytes."""
        with _store(self._path):
            return bytes(self._file.read(size))

    def write(self, data: Any) -> int:
        """Appends bytes."""
        with _store(self._path):
            return int(self._file.write(data))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves the position of the next read, and returns it."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Returns the position of the next read or write."""
        return int(self._file.tell())


class RemoteFiles:
    """The operations of `LocalFiles`, in an object store. Paths are URLs."""

    # Reading.

    def open(self, path: str) -> _Object:
        """Opens an object for reading. Requests are for ranges of it."""
        return _Object(path, "rb", _READ_BYTES)

    def exists(self, path: str) -> bool:
        """Returns True if an object is at a path, or below it."""
        # Some clients' own `exists` returns False if the store cannot be reached.
        with contextlib.suppress(FileNotFoundError), _store(path) as store:
            store.info(path)
            return True
        return False

    def is_directory(self, path: str) -> bool:
        """Returns True if objects are below a path."""
        return any(self._objects(path))

    def is_checkpoint(self, directory: str) -> bool:
        """Returns True if a directory is a checkpoint, intact or damaged."""
        return self.exists(f"{directory}/{MANIFEST}")

    def steps(self, directory: str) -> list[int]:
        """Returns the steps that have a checkpoint, in ascending order."""
        folders = (os.path.split(name) for name in self._objects(directory))
        return sorted(int(x) for x, name in folders if name == MANIFEST and is_step_name(x))

    def find(self, target: str, expected: str = "a checkpoint") -> str:
        """Returns the target; raises FileNotFoundError if nothing but a killed save is there."""
        if self.is_free(target):
            raise FileNotFoundError(f"{target}: expected {expected}, got nothing. Check the path.")
        return target

    def identity(self, target: str) -> object:
        """Returns a value that changes when the checkpoint at a path is removed or replaced."""
        with contextlib.suppress(FileNotFoundError), _store(target) as store:
            return store.ukey(f"{target}/{MANIFEST}")
        return None

    def size(self, directory: str) -> int:
        """Returns the number of bytes of a checkpoint."""
        return sum(info["size"] for info in self._objects(directory).values())

    def _objects(self, directory: str) -> dict[str, dict[str, Any]]:
        """Returns the objects below a path by their relative names; "" is the path itself."""
        with _store(directory) as store:
            root = store._strip_protocol(directory)
            found = store.find(directory, detail=True)
        return {name.removeprefix(root).lstrip("/"): info for name, info in found.items()}

    # Writing one checkpoint.

    def make_directory(self, path: str) -> None:
        """Does nothing, because directories are only parts of names."""

    def taking_turns(self, target: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that does nothing, because nothing can be locked."""
        return contextlib.nullcontext()

    def undo_interrupted_replace(self, target: str) -> None:
        """Does nothing, because a replacement cannot be interrupted."""

    def is_free(self, target: str) -> bool:
        """Returns True if nothing is at a path but arrays of killed saves."""
        return all(map(is_arrays_name, self._objects(target)))

    def begin(self, target: str) -> str:
        """Returns the id of a new save."""
        return secrets.token_hex(4)

    def has_begun(self, target: str) -> bool:
        """Returns True."""
        return True

    def create(self, target: str, name: str) -> _Object:
        """Opens a new object of a checkpoint for writing. It appears when it is closed."""
        return _Object(f"{target}/{name}", "wb", _WRITE_BYTES)

    def commit(self, target: str, manifest: bytes, names: list[str]) -> None:
        """Uploads the manifest, and deletes the arrays of the checkpoint that it replaces."""
        uploaded = self._objects(target)
        if not all(name in uploaded for name in names):
            raise RuntimeError(
                f"{target}: expected the arrays that were uploaded, but they have been deleted. "
                "Another program writes to this path. Use another path."
            )
        with _store(target) as store:
            store.pipe_file(f"{target}/{MANIFEST}", manifest)
        self._delete(target, [x for x in uploaded if is_arrays_name(x) and x not in names])

    def abort(self, target: str, save_id: str) -> None:
        """Does nothing: the next writer cleans up.

        The manifest may have been stored although its upload failed. Then it needs the arrays.
        """

    def _delete(self, directory: str, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError), _store(directory) as store:
                store.rm_file(f"{directory}/{name}")

    # A directory of checkpoints, and its newest writer.

    def require_directory(self, path: str) -> None:
        """Raises an error if the library for a path is not installed."""
        with _store(path):
            pass

    def lock(self, directory: str) -> "_Owner":
        """Returns the record of the newest writer of a directory."""
        return _Owner(f"{directory}/{_OWNER_FILE}")

    def remove_step(self, target: str) -> None:
        """Removes the checkpoint of a step. A kill leaves it complete, or without a manifest."""
        self._delete(target, [MANIFEST, *(x for x in self._objects(target) if x != MANIFEST)])

    def set_aside(self, target: str, new_path: str) -> None:
        """Moves a damaged checkpoint."""
        for name in self._objects(target):
            with _store(target) as store:
                store.cp_file(f"{target}/{name}", f"{new_path}/{name}")
        self.remove_step(target)

    def clean_up(self, directory: str) -> None:
        """Deletes arrays of steps that no manifest names: killed saves and removals left them."""
        objects, folders = self._objects(directory), dict[str, list[str]]()
        for name in objects:
            step, _, file = name.partition("/")
            if is_step_name(step) and is_arrays_name(file):
                folders.setdefault(step, []).append(file)
        for step, files in folders.items():
            path, used_ids = f"{directory}/{step}", set[str]()
            if f"{step}/{MANIFEST}" in objects:
                used_ids = self._used_ids(path, set(map(_save_id, files)))
            self._delete(path, [file for file in files if _save_id(file) not in used_ids])

    def _used_ids(self, directory: str, ids: set[str]) -> set[str]:
        """Returns those ids of saves whose arrays the manifest needs; all if it is damaged."""
        if len(ids) == 1:  # nothing was interrupted, so the manifest need not be read
            return ids
        damage = AttributeError, LookupError, TypeError, ValueError
        with contextlib.suppress(*damage), self.open(f"{directory}/{MANIFEST}") as file:
            return {json.loads(file.read())["checkpoint"].get("save_id", "")}
        return ids


def _save_id(name: str) -> str:
    """Returns the id of a save in the name of an array file."""
    return name.removesuffix(".safetensors").partition("-")[2].partition("-")[2]


class _Owner:
    """A record of the newest writer of a directory, in place of a lock.

    A lock would have to be removed by hand after each kill. A writer that begins replaces the
    record instead, and the one before finds that out when it saves.
    """

    def __init__(self, path: str) -> None:
        self._path, self._record = path, b""

    def is_held(self) -> bool:
        """Returns True if this is the writer; raises RuntimeError if another has taken over."""
        stored = self._stored() if self._record else b""
        if stored not in (b"", self._record):
            writer = json.loads(stored)
            raise RuntimeError(
                f"{os.path.dirname(self._path)}: expected to be the only writer of this directory, "
                f"but {writer['writer']} has taken over at {writer['since']}. Nothing was saved. "
                "Use another directory, or end that process, call close(), and save again."
            )
        # A record that was deleted with the directory is written again.
        return stored != b""

    def acquire(self) -> None:
        """Becomes the writer; raises ObjectStoreError if the store cannot be written."""
        writer = f"process {os.getpid()} on {socket.gethostname()}"
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entries = {"writer": writer, "since": since, "id": secrets.token_hex(8)}
        self._record = json.dumps(entries).encode()
        with _store(self._path) as store:
            store.pipe_file(self._path, self._record)

    def release(self) -> None:
        """Ends the writing. The record stays, and the next writer replaces it."""
        self._record = b""

    def _stored(self) -> bytes:
        with contextlib.suppress(FileNotFoundError), _store(self._path) as store:
            return bytes(store.cat_file(self._path))
        return b""
