"""A series of checkpoints of one training: writing, retention, and restoring."""

import datetime
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from functrain.checkpoint import _leaves, _manifest, _processes, _storage
from functrain.checkpoint._errors import CheckpointCorruptError
from functrain.checkpoint._manifest import DOCUMENTS, STATE
from functrain.checkpoint._step_directory import Monitor, StepDirectory
from functrain.checkpoint._writer import Writer
from functrain.common import _direction, _repr
from functrain.common._checks import is_positive, require, require_instance, require_integer
from functrain.common._types import PyTree
from functrain.common._values import require_numbers, split_members
from functrain.common._warnings import warn
from functrain.engine._position import Position, as_position
from functrain.engine._trigger import Every, Trigger, as_trigger

# Given a manifest, returns the structures to load into, by name of the tree.
_Likes = Callable[[dict[str, Any]], dict[str, PyTree]]
_Content = tuple["Restored", dict[str, PyTree], dict[str, Any]]


class Restored(NamedTuple):
    """What `Checkpointer.restore` returns.

    Attributes:
      state: The state, in the structure that was asked for.
      position: The position of the training.
      values: The values that were saved with it, such as ``{"val_loss": 0.3}``.
      documents: The documents that were saved with it; by a run its history, hooks and data.

    Examples:
      >>> Restored(state=(), position=Position(step=3), values={}, documents={}).position.step
      3
    """

    state: PyTree
    position: Position
    values: dict[str, float]
    documents: dict[str, Any]

    def __repr__(self) -> str:
        document_names = ", ".join(self.documents) or "nothing"
        return (
            f"Restored(state={_repr.state_repr(self.state)}, position={self.position}, "
            f"values={self.values}, documents of {document_names})"
        )


class Checkpointer:
    """Saves a training periodically, to a directory with one checkpoint per step.

    Pass it to `functrain.fit`, `functrain.run` or `bridge.fit`, which resume from its last
    checkpoint if there is one; or save and restore by hand.

    Training continues while a checkpoint is written. It waits only until the state is in host
    memory and, if the previous checkpoint is still being written, for that one. A checkpoint gets
    its name only when it is complete, and all bytes have checksums: damaged ones are never
    returned.

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
      budget: Largest share of the time that saving may take, such as 0.1. A checkpoint that is due
        too early is not saved, but counted in `skipped`; the one at the end of a run is saved. With
        None, every checkpoint that is due is saved.

    Raises:
      ValueError: An argument is invalid.
      FileExistsError: `directory` is a file.
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
        budget: float | None = None,
    ) -> None:
        if keep is not None:
            require_integer("keep", keep, advice="Pass None to keep all checkpoints.")
        if keep_every is not None:
            require_integer("keep_every", keep_every)
        if monitor is not None:
            require_instance("monitor", monitor, str, "the name of a value, such as 'val_loss'")
        is_share = budget is None or (is_positive(budget) and budget <= 1)
        require(is_share, "budget", "a share above 0 and at most 1, or None", budget)
        self.every = as_trigger(every, Every(epochs=1))
        self.keep, self.keep_every, self.monitor = keep, keep_every, monitor
        self.budget, self.skipped = budget, 0
        self._directory = StepDirectory(directory)
        self.directory = self._directory.path
        self._monitored = Monitor(monitor, mode, self._directory)
        self._writer = Writer()
        # Held by the thread that starts a save, or removes checkpoints.
        self._save_lock = threading.RLock()
        self._save_group: _processes.ProcessGroup | None = None
        self._last_save_end, self._last_save_seconds = -math.inf, 0.0

    def __repr__(self) -> str:
        parts = {"directory": self.directory, "every": self.every, "keep": self.keep}
        optional = {"keep_every": self.keep_every, "monitor": self.monitor}
        return _repr.call(self, **parts, **{k: v for k, v in optional.items() if v is not None})

    def __enter__(self) -> Self:
        """Returns the checkpointer, which the end of the block closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the save in progress."""
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in ascending order."""
        return self._directory.steps()

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
                require_numbers("values", {} if values is None else values)
                expected = "documents by name, such as {'notes': ['first try']}"
                require_instance("documents", documents, Mapping | None, expected)
                position = as_position(state, position)
                self.wait()  # the save in progress may be that of a later step
                # `restore` would otherwise return the later one, of a run that was abandoned.
                last_step = self.latest()
                require(
                    last_step is None or last_step <= position.step,
                    self.directory,
                    f"a step after {last_step}, the step of the last checkpoint",
                    position.step,
                    f"To resume from an earlier one: rollback({position.step}).",
                )
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
        if step is not None:
            require_integer("step", step, 0)
        return self._read(lambda manifest: {STATE: like}, step)[0]

    def verify(self, step: int | None = None) -> dict[int, str]:
        """Reads checkpoints and compares every byte with its checksum.

        Args:
          step: The step to verify; None for all.

        Returns:
          The damage by step; empty if all checkpoints are intact.
        """
        if step is not None:
            require_integer("step", step, 0)
        self.wait()
        return self._directory.verify(step)

    def rollback(self, step: int) -> None:
        """Removes all checkpoints of later steps, so that training can resume from this one.

        Raises:
          FileNotFoundError: There is no checkpoint of this step.
          CheckpointCorruptError: The checkpoint is damaged. Nothing was removed.
          RuntimeError: Another process or checkpointer writes to the directory.
        """
        require_integer("step", step, 0)
        with self._save_lock:
            self.wait()
            group = _processes.main_group
            # First, since the locking would create the directory.
            group.call_on_first(lambda: self._directory.find(step))
            is_writer = group.call_on_first(self._directory.is_locked)
            group.call_on_first(self._directory.require_writable)
            try:
                self._visible_steps()
                with group.raise_in_all():
                    # Otherwise a rollback to a damaged checkpoint could leave no intact one.
                    _storage.verify(self._directory.find(step))
                group.call_on_first(lambda: self._directory.remove_later(step))
            finally:
                # The run that resumes may have another checkpointer.
                if not is_writer:
                    self._directory.release()

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
                self._directory.release()

    # Used by runs, in `functrain/loop/_saving.py`.

    def _prepare(self) -> None:
        """Raises an error unless checkpoints can be written where all processes can see them."""
        group = _processes.main_group
        group.call_on_first(self._directory.require_writable)
        path, steps = group.call_on_first(lambda: [self.directory, self.steps()])
        with group.raise_in_all():
            _processes.wait_until_visible(self.directory, path, lambda: self.steps() == steps)

    def _visible_steps(self) -> list[int]:
        """Returns the steps that the first process sees, as soon as this one sees them as well."""
        if not _processes.is_multiprocess():
            return self.steps()
        group = _processes.main_group
        steps: list[int]
        path, steps = group.call_on_first(lambda: [self.directory, self.steps()])
        with group.raise_in_all():
            _processes.wait_until_visible(
                self.directory, path, lambda: set(steps) <= set(self.steps())
            )
        return steps

    def _is_improved(self, values: Mapping[str, Any]) -> bool:
        """Returns True if the value of `monitor=` is better than every saved one."""
        flat_values = split_members(values)
        if self.monitor not in flat_values:
            return False
        # Only some processes could know the value of the save in progress, and the listing of
        # another than the first may be old. They must not answer differently.
        if _processes.is_multiprocess():
            self.wait()
        group = _processes.main_group
        return bool(group.call_on_first(lambda: bool(self._monitored.is_improved(flat_values))))

    def _is_within_budget(self) -> bool:
        """Returns True if the budget allows a save now; otherwise counts it in `skipped`."""
        if self.budget is None:
            return True
        # Read before the clock: otherwise a save that ends in between would be overlooked.
        is_busy = self._writer.is_busy
        elapsed = time.perf_counter() - self._last_save_end
        is_within = not is_busy and elapsed >= self._last_save_seconds / self.budget
        self.skipped += not is_within
        return is_within

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
        start = time.perf_counter()
        flat_values = split_members(values)
        with _processes.main_group.raise_in_all():
            target = self._directory.new_target(position.step)
            arrays, encoded_documents = _leaves.named_leaves(trees), {}
            for name, document in documents.items():
                path = f"{DOCUMENTS}/{name}"
                encoded_documents[name] = _manifest.encode(document, path, arrays)
            leaves = _leaves.fetch_leaves(arrays, copy=copy)
        entries = {
            "step": position.step,
            "position": position._asdict(),
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "values": _manifest.encode(flat_values, "values", {}),
            **entries,
            "trees": list(trees),
            "run": _manifest.fingerprint(trees.get(STATE)),
            "documents": encoded_documents,
        }
        _processes.main_group.call_on_first(self._directory.require_writable)
        self._save_group = group = self._save_group or _processes.new_save_group()

        def work() -> None:
            try:
                _storage.write_checkpoint(target, leaves, entries, group, self._directory.is_locked)
                self._monitored.record(position.step, flat_values)
                if _processes.is_first() and self.keep is not None:
                    best = self._monitored.best()
                    self._directory.remove_surplus(self.keep, best, self.keep_every, kept_before)
            finally:
                # A save that failed counts as well, because it took its time.
                self._last_save_end = time.perf_counter()
                self._last_save_seconds = self._last_save_end - start

        self._writer.start(work)

    def _read(self, likes: _Likes, step: int | None = None) -> _Content:
        """Loads a checkpoint. Returns its content, its trees by name, and its manifest."""
        self.wait()
        group = _processes.main_group
        steps = self._visible_steps()
        candidates = [step] if step is not None else steps[::-1]
        if not candidates:
            raise FileNotFoundError(
                f"{self.directory}: expected a checkpoint, got none. Check the directory."
            )
        reasons: list[str] = []
        for n in candidates:
            failure, read = None, functools.partial(self._read_step, n, likes)
            try:
                result = _storage.read_unless_replaced(self._directory.target(n), read)
            except Exception as error:
                failure = error
            # The writer has removed it since the listing. Several processes would see that at
            # different times.
            is_removed = step is None and isinstance(failure, FileNotFoundError)
            if is_removed and not _processes.is_multiprocess():
                return self._read(likes)
            # All processes load the same checkpoint, or all pass over it.
            failures = group.exchange_failures(failure)
            if not failures:
                for reason in reasons:
                    warn(f"Passed over, for step {n}: {reason}")
                return result
            reason = _processes.describe_failures(failures)
            # An older checkpoint helps only if this one is damaged. An OtherProcessError is a
            # consequence of the failure in another process, which has its own entry.
            error_names = {text.partition(":")[0] for text in failures.values()}
            error_names.discard(_processes.OtherProcessError.__name__)
            if step is not None or error_names != {CheckpointCorruptError.__name__}:
                raise failure or _processes.OtherProcessError(reason)
            reasons.append(reason)
        raise CheckpointCorruptError(
            f"{self.directory}: expected an intact checkpoint, but all are damaged:\n"
            + "\n".join(reasons)
        )

    def _read_step(self, step: int, likes: _Likes) -> _Content:
        directory = self._directory.find(step)
        manifest = _manifest.read_manifest(directory)
        # No structure is needed for the arrays of documents: they are read by their names.
        names = [name for name in manifest["leaves"] if _leaves.tree_name(name) == DOCUMENTS]
        trees, arrays = _storage.read_trees(directory, manifest, likes(manifest), names)
        with _manifest.parsing(f"{directory}: expected a position and documents"):
            documents = {}
            for name, document in manifest["documents"].items():
                documents[name] = _manifest.decode(document, arrays)
            position = Position(**manifest.get("position", {}))
        return Restored(trees.get(STATE), position, manifest["values"], documents), trees, manifest
