"""The arrays of a checkpoint on disk: Orbax writes them, TensorStore reads them.

Saves of one process take turns. Orbax numbers its operations in one global counter, and the threads
of a save look up what to wait for by the newest number (orbax-checkpoint 0.12.8,
`_src/futures/future.py`): of two saves at a time one fails, or waits for minutes.

Orbax reads through TensorStore, in event loops that it closes when the first of many reads fails.
The others end later, and each prints a traceback. TensorStore needs no event loop: it reads in any
thread, beside any save, and a read that fails raises one error.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from functrain.checkpoint._about import ARRAYS
from functrain.checkpoint._errors import CheckpointCorruptError
from functrain.checkpoint._leaves import Leaf, Parts, folder_of, path_of, slices
from functrain.common import _tree

_INDEX = "manifest.ocdbt"
_INDEX_CACHE = 100 * 2**20  # bytes, as Orbax has it: without a cache each array reads the index
_LATE = 10.0  # seconds to wait for the other threads of a save that failed

_turns = threading.Lock()


def _forget_turns() -> None:
    """Frees the lock in a forked child, where the thread that holds it does not exist."""
    global _turns
    _turns = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_turns)


@contextlib.contextmanager
def turn_to_save() -> Iterator[None]:
    """Waits until no other save of this process uses Orbax; keeps others waiting until it ends.

    It may end in another thread than it began in. One that Ctrl-C leaves without an end is ended
    by Python's garbage collection.
    """
    with _turns, _late_writes_ignored(), _log_held_back():
        yield


@contextlib.contextmanager
def failing_to_write(directory: str) -> Iterator[None]:
    """Makes an OSError of what Orbax raises: TensorStore has a full disk as a ValueError."""
    try:
        yield
    except Exception as error:
        raise _writing_error(directory, error) from None


def _writing_error(directory: str, error: Exception) -> OSError:
    """Returns an OSError without the dozens of frames and causes that Orbax's has."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename or directory)
    kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "  # a full disk, too
    return OSError(f"{directory}: failed to write: {kind}{_shortened(error)}")


@contextlib.contextmanager
def _log_held_back() -> Iterator[None]:
    """Drops the warnings and errors that Orbax logs if an exception says the same."""
    import orbax.checkpoint

    folder = os.path.dirname(orbax.checkpoint.__file__)
    records: list[logging.LogRecord] = []

    def passes(record: logging.LogRecord) -> bool:
        is_held = record.levelno >= logging.WARNING and record.pathname.startswith(folder)
        if is_held:
            records.append(record)
        return not is_held

    logger = logging.getLogger("absl")
    logger.addFilter(passes)
    try:
        yield
    except Exception:
        for thread in threading.enumerate():  # one that goes on would log its own failure later
            if type(thread).__module__.startswith("orbax."):
                threading.Thread.join(thread, _LATE)  # their own raises what they have raised
        records.clear()
        raise
    finally:
        logger.removeFilter(passes)
        for record in records:
            logger.handle(record)


def save_options() -> contextlib.AbstractContextManager[Any]:
    """Returns the Orbax context for saving: uncompressed, so that nothing is copied in memory.

    OCDBT keeps compressed values in memory until its commit, so compression takes as much memory
    as it writes: 244 MiB for 256 MiB of weights, against 2 MiB without. zstd made float32 weights
    8 % smaller, for three times the processor time.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_compression = False
    manager: contextlib.AbstractContextManager[Any] = context
    return manager


def release(leaves: Mapping[str, Leaf]) -> None:
    """Lets the memory of written leaves go with their last reference.

    Orbax reads `addressable_shards`, a cached property: an array on one device refers to itself
    from then on, and would stay until the garbage collector comes (jax 0.10, 0.12).
    """
    for leaf in leaves.values():
        with contextlib.suppress(AttributeError):  # not cached, or an array of NumPy's
            del leaf.array.addressable_shards


@contextlib.contextmanager
def _late_writes_ignored() -> Iterator[None]:
    """Drops what TensorStore prints of writes that end after Orbax has closed their event loop.

    That is so in a save that fails, of which some writes end even later than the save. So the hook
    stays after a failure, until a save succeeds; all else goes to the hook that was there before.
    """
    before = sys.unraisablehook
    if isinstance(before, _IgnoresLateWrites):
        before = before.otherwise
    sys.unraisablehook = hook = _IgnoresLateWrites(before)
    yield
    if sys.unraisablehook is hook:
        sys.unraisablehook = before


class _IgnoresLateWrites:
    """A `sys.unraisablehook` for all but callbacks into a closed event loop."""

    def __init__(self, otherwise: Callable[[Any], Any]) -> None:
        self.otherwise = otherwise

    def __call__(self, unraisable: Any) -> None:
        is_callback = unraisable.object is None and isinstance(unraisable.exc_value, RuntimeError)
        if not (is_callback and str(unraisable.exc_value) == "Event loop is closed"):
            self.otherwise(unraisable)


class Stored:
    """The arrays in a checkpoint, opened to be read.

    Args:
      directory: The checkpoint.
      names: The arrays that it is said to have.

    Raises:
      CheckpointCorruptError: The index cannot be read, or has other names.
    """

    def __init__(self, directory: str, names: Collection[str]) -> None:
        import tensorstore

        self._directory, self._open = directory, tensorstore.open
        self._context = tensorstore.Context(
            {"cache_pool#index": {"total_bytes_limit": _INDEX_CACHE}}
        )
        self._index = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": _folder_of_index(directory) + "/"},
            "cache_pool": "cache_pool#index",
        }
        try:
            keys = tensorstore.KvStore.open(self._index, context=self._context).result().list()
            there = {_folder_of_metadata(key.decode()) for key in keys.result()} - {""}
        except Exception as error:
            raise CheckpointCorruptError(
                f"{directory}: the index of its arrays cannot be read: {_shortened(error)}\n"
                "The checkpoint is damaged: take another."
            ) from None
        listed = {folder_of(name) for name in names}
        missing, unknown = sorted(listed - there), sorted(there - listed)
        lines = [f"{path_of(x[:-1])}: listed, but not stored" for x in missing]
        lines += [f"{path_of(x[:-1])}: stored, but not listed" for x in unknown]
        if lines:
            raise CheckpointCorruptError(
                f"{directory}: its arrays are not those that it lists:\n"
                f"{_tree.bullets(lines)}\nThe checkpoint is damaged: take another."
            )

    def read(
        self, likes: Mapping[str, np.ndarray], own: Mapping[str, Sequence[str]]
    ) -> dict[str, Any]:
        """Reads arrays, all at once.

        Args:
          likes: For each array to read one of its shape and dtype; values are not used.
          own: The places of the parts to read of an array, where that is not all of it.

        Raises:
          CheckpointCorruptError: Names those that cannot be read, or are of another shape or dtype.
        """
        faults: dict[str, str] = {}

        def attempt(act: Callable[[str], Any]) -> dict[str, Any]:
            results = {}
            for name in likes:
                try:
                    if name not in faults:
                        results[name] = act(name)
                except Exception as error:
                    faults[name] = _shortened(error)
            return results

        opening = attempt(self._begin_to_open)
        reading = attempt(
            lambda name: _begin_to_read(opening[name].result(), likes[name], own.get(name))
        )
        arrays = attempt(lambda name: reading[name].result())
        if faults:
            lines = [f"{path_of(name)}: {reason}" for name, reason in faults.items()]
            raise CheckpointCorruptError(
                f"{self._directory}: these leaves cannot be read:\n{_tree.bullets(lines)}\n"
                "The checkpoint is damaged: take another."
            )
        return arrays

    def _begin_to_open(self, name: str) -> Any:
        spec = {"driver": "zarr3", "kvstore": {**self._index, "path": folder_of(name)}}
        return self._open(spec, context=self._context, open=True, read=True)


def _folder_of_index(directory: str) -> str:
    """Returns the folder of `arrays/` in which Orbax has put the arrays."""
    arrays = os.path.join(directory, ARRAYS)
    try:
        folders = sorted(entry.path for entry in os.scandir(arrays) if entry.is_dir())
    except OSError as error:
        raise CheckpointCorruptError(
            f"{arrays}: the arrays of the checkpoint cannot be read: {error.strerror}. The "
            "checkpoint is damaged: take another."
        ) from None
    with_index = [path for path in folders if os.path.isfile(os.path.join(path, _INDEX))]
    if not with_index:
        raise CheckpointCorruptError(
            f"{arrays}: expected a folder with the index of the arrays, got none that has a file "
            f"{_INDEX}. The checkpoint is damaged: take another."
        )
    return with_index[0]


def _folder_of_metadata(key: str) -> str:
    """Returns the folder of an array, given the key of its metadata; "" for other keys."""
    return key.removesuffix("zarr.json") if key.endswith("/zarr.json") else ""


def _begin_to_read(store: Any, like: np.ndarray, own: Sequence[str] | None) -> Any:
    """Begins to read an array, if it is what it is said to be: else no memory is taken for it."""
    dtype = store.dtype.numpy_dtype
    if (store.shape, dtype) != (like.shape, like.dtype):
        raise ValueError(f"{dtype}{list(store.shape)} in the file")
    chunk = store.chunk_layout.write_chunk.shape or ()  # memory is taken for whole chunks
    if any(length > max(axis, 1) for length, axis in zip(chunk, like.shape, strict=False)):
        raise ValueError(f"chunks of {list(chunk)} in the file")
    if own is None:
        return store.read()
    return _Reading(like, {place: store[slices(place)].read() for place in own})


class _Reading(NamedTuple):
    """Parts of an array that are being read."""

    like: np.ndarray
    by_place: Mapping[str, Any]

    def result(self) -> Parts:
        found = {place: future.result() for place, future in self.by_place.items()}
        return Parts(self.like.shape, self.like.dtype, found)


def _shortened(error: Exception, most: int = 300) -> str:
    """Returns the text of an error without the options of TensorStore's, which take kilobytes."""
    return str(error).partition(" [tensorstore_spec=")[0][:most] or type(error).__name__
