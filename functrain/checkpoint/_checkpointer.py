"""A series of checkpoints of one training: writing, retention, and restoring."""

import datetime
import functools
import os
import threading
from collections.abc import Mapping
from typing import Any, Self

from functrain.checkpoint import _checkpoint, _directory, _leaves, _manifest, _processes
from functrain.checkpoint._checkpoint import Content, Likes, Restored
from functrain.checkpoint._directory import Monitor
from functrain.checkpoint._files import files_at, resolve_path
from functrain.checkpoint._manifest import DOCUMENTS, STATE
from functrain.checkpoint._writer import Writer
from functrain.common import _direction, _repr
from functrain.common._checks import require, require_instance, require_integer
from functrain.common._log_values import split_members
from functrain.common._types import PyTree
from functrain.engine._position import Position, as_position
from functrain.engine._trigger import Every, Trigger, as_trigger


class Checkpointer:
    """Saves a training periodically, to a directory with one checkpoint per step.

    Pass it to `functrain.fit`, `functrain.run` or `bridge.fit`, which resume from its last
    checkpoint if there is one; or save and restore by hand.

    Training continues while a checkpoint is written. It waits only until the state is in host
    memory and, if the previous checkpoint is still being written, for that one. A checkpoint is
    listed only when it is complete, and all bytes have checksums: damaged ones are never returned.

    Several processes (`jax.distributed`) each make a Checkpointer with one directory that all can
    see, and call its methods alike. Each process writes its parts of the arrays.

    Args:
      directory: A local directory, or a URL such as ``gs://bucket/run`` or ``s3://bucket/run``
        (``pip install 'functrain[remote]'``). It is created by the first save.
      every: A number of steps, or a trigger such as ``ft.every(seconds=600)``. By default, a
        checkpoint is saved at the end of each epoch.
      keep: The number of newest checkpoints to keep; None for all. The best one is kept as well;
        and while the loss of a fit is NaN or infinite, the last one from before.
      keep_every: A number of steps, such as 10_000: every checkpoint whose step is a multiple of it
        is kept as well. It does not cause a save: choose a multiple of `every`.
      monitor: Name of a value, such as ``"val_loss"``, whose best checkpoint is kept. The best
        epoch so far is always saved, also when it is not due. NaN and infinity are never best.
      mode: ``"min"`` or ``"max"`` says which values are better; ``"auto"`` tells by the name.

    Raises:
      ValueError: An argument is invalid.
      ImportError: It is a URL, and the library for it is not installed.

    Examples:
      >>> import jax.numpy as jnp, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with Checkpointer(folder, keep=2) as checkpoints:
      ...         for step in (10, 20, 30):
      ...             checkpoints.save({"w": jnp.full(2, step)}, Position(step))
      ...         restored = checkpoints.restore(like={"w": jnp.zeros(2, jnp.int32)})
      ...         print(checkpoints.steps(), restored.position.step, restored.state["w"])
      [20, 30] 30 [30 30]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | Trigger | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        monitor: str | None = None,
        mode: _direction.Mode = "auto",
    ) -> None:
        if keep is not None:
            require_integer("keep", keep, advice="Pass None to keep all checkpoints.")
        if keep_every is not None:
            require_integer("keep_every", keep_every)
        if monitor is not None:
            require_instance("monitor", monitor, str, "the name of a value, such as 'val_loss'")
        self.every = as_trigger(every, Every(epochs=1))
        self.keep, self.keep_every, self.monitor = keep, keep_every, monitor
        self.directory = resolve_path(directory, "directory")
        self._lock = files_at(self.directory).lock(self.directory)
        self._monitored = Monitor(monitor, mode, self.directory)
        self._writer = Writer()
        # Held by the thread that starts a save, or removes checkpoints.
        self._save_lock = threading.RLock()
        self._save_group: _processes.ProcessGroup | None = None

    def __repr__(self) -> str:
        names = ("directory", "every", "keep", "keep_every", "monitor")
        return _repr.call(self, **{name: getattr(self, name) for name in names})

    def __enter__(self) -> Self:
        """Returns the checkpointer, which the end of the block closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the save in progress."""
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in ascending order."""
        return _directory.steps(self.directory)

    def latest(self) -> int | None:
        """Returns the step of the last checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the step whose value of `monitor=` is best; None if no value was saved.

        Raises:
          ValueError: The checkpointer has no `monitor=`.
        """
        advice = "Name one in Checkpointer(..., monitor='val_loss')."
        require(self.monitor is not None, "monitor", "the name of a value", None, advice)
        return self._monitored.best()

    def save(
        self,
        state: PyTree,
        position: Position | int | None = None,
        *,
        values: Mapping[str, float] | None = None,
        documents: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> None:
        """Saves a state.

        Args:
          state: Any pytree of arrays.
          position: The position of the training, or its step; None for the state's own `step`.
          values: Values to save with it, such as ``{"val_loss": 0.3}``.
          documents: Other data to save with it: by name, dicts, lists and tuples of numbers, texts
            and arrays.
          wait: False returns when the state is in host memory. A later error is raised by the next
            `save`, `wait` or `close`.

        Raises:
          RuntimeError: Another process or checkpointer writes to the directory; an object store
            refused the request or could not be reached.
          ValueError: Later checkpoints exist, which `rollback` deletes; or the step has more than
            twelve digits.
          TypeError: A leaf is not an array, or a document holds something else.
          OSError: The checkpoint cannot be written.
        """
        with self._save_lock:
            with _processes.main_group.raise_in_all():
                position = as_position(state, position)
                self.wait()  # the save in progress may be that of a later step
                # `restore` would otherwise return the later one, of a run that was abandoned.
                step, last_step = position.step, max(self.steps(), default=-1)
                expected = f"a step after {last_step}, the step of the last checkpoint"
                advice = f"To resume from an earlier one: rollback({step})."
                require(last_step <= step, self.directory, expected, step, advice)
            self._write({STATE: state}, position, values or {}, documents or {}, copy=not wait)
            # With the lock: the save of another thread would get this one's error.
            if wait:
                self.wait()

    def restore(self, like: PyTree, step: int | None = None) -> Restored:
        """Loads a state into the structure, dtypes and shardings of another.

        Args:
          like: As for `functrain.load`.
          step: The step to load; None for the last checkpoint that is not damaged. A warning tells
            what is wrong with each damaged one.

        Returns:
          Restored(state, position, values, documents).

        Raises:
          FileNotFoundError: There is no checkpoint.
          CheckpointMismatchError: It has another model, optimizer or dtype; each leaf is named.
          CheckpointCorruptError: It is damaged; with `step=None`, all of them are.
        """
        return self._read(lambda manifest: {STATE: like}, step)[0]

    def verify(self, step: int | None = None) -> dict[int, str]:
        """Reads checkpoints and compares every byte with its checksum.

        Args:
          step: The step to verify; None for all.

        Returns:
          The damage by step; empty if all checkpoints are intact.
        """
        self.wait()
        steps = self.steps() if step is None else [step]
        paths = {_directory.path_of(self.directory, n): n for n in steps}
        _, damage = _directory.read_each(paths, _checkpoint.verify, skip_missing=step is None)
        return {paths[path]: reason for path, reason in damage.items()}

    def rollback(self, step: int) -> None:
        """Removes all checkpoints of later steps, so that training can resume from this one.

        Raises:
          FileNotFoundError: There is no checkpoint of this step.
          CheckpointCorruptError: The checkpoint is damaged. Nothing was removed.
          RuntimeError: Another process or checkpointer writes to the directory.
        """
        with self._save_lock:
            self.wait()
            group = _processes.main_group
            _directory.visible_steps(self.directory)
            with group.raise_in_all():
                # Otherwise a rollback to a damaged checkpoint could leave no intact one. Verified
                # before the locking, which creates the directory.
                _checkpoint.verify(_directory.path_of(self.directory, step))
            group.call_on_first(self._require_writable)
            remove = _directory.remove
            try:
                group.call_on_first(lambda: _directory.for_later(remove, self.directory, step))
            finally:
                # The run that resumes may have another checkpointer.
                self._lock.release()

    def wait(self) -> None:
        """Waits for the save in progress, and raises its error."""
        self._writer.wait()

    def close(self) -> None:
        """Waits for the save in progress, and lets others write. It may be used again."""
        try:
            self.wait()
        finally:
            # A second Ctrl-C interrupts the wait: then the lock is released with the process.
            if not self._writer.is_busy:
                self._lock.release()

    # Used by runs, in `functrain/loop/_saving.py`.

    def _require_writable(self) -> None:
        """Creates and locks the directory, and cleans up what killed saves left."""
        if not self._lock.is_held():
            files_at(self.directory).make_directory(self.directory)
            self._lock.acquire()
            try:
                _directory.clean_up(self.directory)
            except BaseException:
                self._lock.release()
                raise

    def _is_improved(self, values: Mapping[str, Any]) -> bool:
        """Returns True if the value of `monitor=` is better than every saved one."""
        value = split_members(values).get(self.monitor or "")
        if value is None:
            return False
        # Only some processes could know the value of the save in progress, and the listing of
        # another than the first may be old. They must not answer differently.
        if _processes.is_multiprocess():
            self.wait()
        is_improved = self._monitored.is_improved
        return bool(_processes.main_group.call_on_first(lambda: is_improved(value)))

    def _write(
        self,
        trees: dict[str, PyTree],
        position: Position,
        values: Mapping[str, Any],
        documents: Mapping[str, Any],
        *,
        copy: bool,
        kept_before: int | None = None,
        **entries: Any,
    ) -> None:
        """Starts to write a checkpoint, and returns when its arrays are in host memory.

        `trees` are the state, and others whose structure is known when restoring. `copy` is needed
        if programs may donate them before they are written. The newest checkpoint of a step before
        `kept_before` is not removed. `entries` go into the manifest.
        """
        # Documents and leaves are copied before training continues. Only the writing is left to
        # the thread.
        self.wait()
        flat_values = split_members(values)
        with _processes.main_group.raise_in_all():
            path = _directory.path_of(self.directory, position.step)
            arrays = _leaves.named_leaves(trees)
            encoded_documents = _manifest.encode(documents, DOCUMENTS, arrays)
            leaves = _leaves.fetch_leaves(arrays, copy=copy)
        entries = {
            "step": position.step,
            "position": position._asdict(),
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "values": flat_values,
            **entries,
            "trees": list(trees),
            "run": _manifest.fingerprint(trees.get(STATE)),
            "documents": encoded_documents,
        }
        _processes.main_group.call_on_first(self._require_writable)
        self._save_group = group = self._save_group or _processes.new_save_group()

        def work() -> None:
            _checkpoint.write_checkpoint(path, leaves, entries, group, self._lock.is_held)
            self._monitored.record(position.step, flat_values)
            if _processes.is_first() and self.keep is not None:
                kept = self.keep, self._monitored.best(), self.keep_every, kept_before
                _directory.remove_surplus(self.directory, *kept)

        self._writer.start(work)

    def _read(self, likes: Likes, step: int | None = None) -> Content:
        """Loads a checkpoint. Returns its content, its trees by name, and its manifest."""
        self.wait()
        read = functools.partial(_checkpoint.read_checkpoint, likes)
        if step is None:
            return _directory.read_newest(self.directory, read)
        _directory.visible_steps(self.directory)
        with _processes.main_group.raise_in_all():
            path = _directory.path_of(self.directory, step)
            return _checkpoint.read_current(path, read)
