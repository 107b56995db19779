"""A series of checkpoints of one training: writing, retention, and restoring."""

import atexit
import contextlib
import datetime
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any, NamedTuple, Self

from functrain.checkpoint import _leaves, _manifest, _processes, _storage
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._manifest import DOCUMENTS, STATE, is_checkpoint, is_step_name
from functrain.common import _direction, _locks, _repr
from functrain.common._checks import is_integer, require, require_integer
from functrain.common._types import PyTree
from functrain.common._values import split_members
from functrain.common._warnings import warn
from functrain.engine._position import Position, require_position
from functrain.engine._trigger import Every, Trigger, as_trigger

_LOCK_FILE, _DAMAGED = ".functrain-lock", "damaged-"

# Given a manifest, returns the structures to load into, by name of the tree.
_Likes = Callable[[dict[str, Any]], dict[str, PyTree]]
# What was saved, the trees by name, and the manifest.
_Content = tuple["Restored", dict[str, PyTree], dict[str, Any]]


class Restored(NamedTuple):
    """What `Checkpointer.restore` returns.

    Attributes:
      state: The state, in the structure that was asked for.
      position: The position of the training.
      values: The values that were saved with it, such as ``{"val_loss": 0.3}``.
      documents: The documents that were saved with it: by a run its history, and the states of
        hooks and loader.

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

    Several processes (`jax.distributed`) each make a Checkpointer with one directory that all of
    them can see, and call its methods alike. Each process writes its parts of the arrays.

    Args:
      directory: A local directory. It is created by the first save.
      every: A number of steps, or a trigger such as ``ft.every(seconds=600)``. By default, a
        checkpoint is saved at the end of each epoch.
      keep: The number of newest checkpoints to keep; None for all. The best one is kept as well.
      monitor: Name of a value, such as ``"val_loss"``, whose best checkpoint is kept. The best
        epoch so far is always saved, also when it is not due. NaN is never best.
      mode: ``"min"`` or ``"max"`` says which values are better; ``"auto"`` tells by the name.
      budget: Largest share of the time that saving may take, such as 0.1. A checkpoint that is due
        too early is not saved, but counted in `skipped`; the one at the end of a run is saved. With
        None, every checkpoint that is due is saved.

    Raises:
      ValueError: An argument is invalid.
      FileExistsError: `directory` is a file.

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
        monitor: str | None = None,
        mode: _direction.Mode = "auto",
        budget: float | None = None,
    ) -> None:
        if keep is not None:
            require_integer("keep", keep, advice="Pass None to keep all checkpoints.")
        is_share = budget is None or 0 < budget <= 1
        require(is_share, "budget", "a share above 0 and at most 1, or None", budget)
        self.every = as_trigger(every, Every(epochs=1))
        self.monitor, self.budget, self.keep, self.skipped = monitor, budget, keep, 0
        self.directory = _storage.resolve_local_path(directory, "directory")
        if os.path.lexists(self.directory) and not os.path.isdir(self.directory):
            raise FileExistsError(
                f"{self.directory}: expected a directory for checkpoints, got a file. Choose "
                "another path."
            )
        self._sign = 1.0 if monitor is None else _direction.sign(monitor, mode)
        # Taken by the first save: reading needs no lock.
        self._lock = _locks.Lock(os.path.join(self.directory, _LOCK_FILE))
        self._writer = _Writer()
        # Held by the thread that starts a save, or removes checkpoints.
        self._save_lock = threading.RLock()
        self._save_group: _processes.ProcessGroup | None = None
        # Values of `monitor` by step; None until they are read from the manifests.
        self._monitored: dict[int, float] | None = None
        self._monitored_lock = threading.Lock()
        self._last_save_end, self._last_save_seconds = -math.inf, 0.0

    def __repr__(self) -> str:
        parts = {"directory": self.directory, "every": self.every, "keep": self.keep}
        monitor = {} if self.monitor is None else {"monitor": self.monitor}
        return _repr.call(self, **parts, **monitor)

    def __enter__(self) -> Self:
        """Returns the checkpointer, which the end of the block closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the save in progress."""
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in ascending order."""
        if not os.path.isdir(self.directory):
            return []
        steps = set()
        for name in os.listdir(self.directory):
            step_name = name.removesuffix(_storage.OLD)
            path = os.path.join(self.directory, name)
            if not is_step_name(step_name):
                continue
            if is_checkpoint(path):
                steps.add(int(step_name))
            elif not os.path.lexists(path):
                return self.steps()  # the writer has replaced it since the listing
        return sorted(steps)

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
        return best_step(self._monitored_values(), self._sign)

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
          RuntimeError: Another process or checkpointer writes to the directory.
          ValueError: Later checkpoints exist. `rollback` deletes them.
          TypeError: A leaf is not an array, or a document holds something else.
          OSError: The checkpoint cannot be written.
        """
        with self._save_lock:
            with _processes.main_group.raise_in_all():
                position = _as_position(state, position)
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
        damage: dict[int, str] = {}
        for n in self.steps() if step is None else [step]:
            try:
                _storage.verify(self._find(n))
            except (CheckpointCorruptError, CheckpointMismatchError, FileNotFoundError) as error:
                if step is None and n not in self.steps():
                    continue  # the writer has removed it since the listing
                if not isinstance(error, CheckpointCorruptError):
                    raise
                damage[n] = str(error)
        return damage

    def rollback(self, step: int) -> None:
        """Removes all checkpoints of later steps, so that training can resume from this one.

        Raises:
          FileNotFoundError: There is no checkpoint of this step.
          CheckpointCorruptError: The checkpoint is damaged. Nothing was removed.
          RuntimeError: Another process or checkpointer writes to the directory.
        """
        with self._save_lock:
            self.wait()
            _processes.main_group.call_on_first(self._require_writable)
            with _processes.main_group.raise_in_all():
                # Otherwise a rollback to a damaged checkpoint could leave no intact one.
                _storage.verify(self._find(step))
            self._for_later_steps(step, self._remove)
            self._monitored = None

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

    def _prepare(self) -> None:
        """Raises an error unless checkpoints can be written where all processes can see them."""
        group = _processes.main_group
        group.call_on_first(self._require_writable)
        path, steps = group.call_on_first(lambda: [self.directory, self.steps()])
        with group.raise_in_all():
            _processes.wait_until_visible(self.directory, path, lambda: self.steps() == steps)

    def _set_aside_later_steps(self, step: int) -> None:
        """Renames the checkpoints of later steps, which are damaged."""

        def set_aside(later_step: int) -> None:
            new_path = os.path.join(self.directory, f"{_DAMAGED}{later_step:012d}")
            _storage.remove(new_path)
            with contextlib.suppress(OSError):
                os.rename(self._target(later_step), new_path)

        self._for_later_steps(step, set_aside)

    def _is_improved(self, values: Mapping[str, Any]) -> bool:
        """Returns True if the value of `monitor=` is better than every saved one."""
        flat_values = split_members(values)
        if self.monitor is None or self.monitor not in flat_values:
            return False
        # Otherwise only some processes could know the value of the save in progress, and they
        # would answer differently.
        if _processes.is_multiprocess():
            self.wait()
        saved = self._monitored_values()
        new_step = max(saved, default=0) + 1
        values_by_step = {**saved, new_step: flat_values[self.monitor]}
        return best_step(values_by_step, self._sign) == new_step

    def _is_within_budget(self) -> bool:
        """Returns True if the budget allows a save now; otherwise counts it in `skipped`."""
        if self.budget is None:
            return True
        # Read before the clock: otherwise a save that ends in between would be overlooked.
        is_busy = self._writer.is_busy
        elapsed = time.perf_counter() - self._last_save_end
        if is_busy or elapsed < self._last_save_seconds / self.budget:
            self.skipped += 1
            return False
        return True

    def _write(
        self,
        trees: dict[str, PyTree],
        position: Position,
        values: Mapping[str, Any],
        documents: Mapping[str, Any],
        *,
        copy: bool,
        **entries: Any,
    ) -> None:
        """Starts to write a checkpoint, and returns when its arrays are in host memory.

        Args:
          trees: By name in the file: `state`, and others whose structure is known when restoring.
          position: As for `save`.
          values: As for `save`.
          documents: As for `save`.
          copy: True if programs may donate the trees before they are written.
          **entries: Other entries of the manifest.
        """
        # Documents and leaves are copied before training continues. Only the writing is left to
        # the thread.
        self.wait()
        start = time.perf_counter()
        flat_values = split_members(values)
        with _processes.main_group.raise_in_all():
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
        _processes.main_group.call_on_first(self._require_writable)
        target = self._target(position.step)
        self._save_group = group = self._save_group or _processes.new_save_group()

        def work() -> None:
            try:
                _storage.write_checkpoint(target, leaves, entries, group, self._require_writable)
                with self._monitored_lock:
                    if self._monitored is not None and self.monitor is not None:
                        self._monitored[position.step] = flat_values.get(self.monitor, math.nan)
                if _processes.is_first():
                    self._remove_surplus()
            finally:
                # A save that failed counts as well, because it took its time.
                self._last_save_end = time.perf_counter()
                self._last_save_seconds = self._last_save_end - start

        self._writer.start(work)

    def _read(self, likes: _Likes, step: int | None = None) -> _Content:
        """Loads a checkpoint. Returns its content, its trees by name, and its manifest.

        Args:
          likes: Given the manifest, returns the structures to load into, by name.
          step: The step to load; None for the last checkpoint that is not damaged.
        """
        self.wait()
        group = _processes.main_group
        candidates = [step] if step is not None else group.call_on_first(self.steps)[::-1]
        if not candidates:
            raise FileNotFoundError(
                f"{self.directory}: expected a checkpoint, got none. Check the directory."
            )
        reasons: list[str] = []
        for n in candidates:
            identity, failure = _storage.file_identity(self._target(n)), None
            try:
                result = self._read_step(n, likes)
            except Exception as error:
                failure = error
            new_identity = _storage.file_identity(self._target(n))
            is_replaced = new_identity != identity or (step is None and not new_identity)
            # The writer may have removed or replaced it in the meantime: then start again. Several
            # processes would see that at different times.
            if failure is not None and is_replaced and not _processes.is_multiprocess():
                return self._read(likes, step)
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
        directory = self._find(step)
        manifest = _manifest.read_manifest(directory)
        names = [name for name in manifest["leaves"] if _leaves.tree_name(name) == DOCUMENTS]
        trees, arrays = _storage.read_trees(directory, manifest, likes(manifest), names)
        with _manifest.parsing(f"{directory}: expected a position and documents"):
            documents = {}
            for name, document in manifest["documents"].items():
                documents[name] = _manifest.decode(document, arrays)
            position = Position(**manifest.get("position", {"step": manifest.get("step", 0)}))
        return Restored(trees.get(STATE), position, manifest["values"], documents), trees, manifest

    # The directories of steps, such as `000000001200`. Only complete checkpoints have such names.

    def _target(self, step: int) -> str:
        """Returns the path where the checkpoint of a step belongs."""
        return os.path.join(self.directory, f"{step:012d}")

    def _find(self, step: int) -> str:
        """Returns the path of an existing checkpoint; raises FileNotFoundError if there is none."""
        steps = self.steps()
        expected = f"one of the steps that have a checkpoint, {steps}"
        require(step in steps, self.directory, expected, step, error=FileNotFoundError)
        return _storage.find_checkpoint(self._target(step))

    def _require_writable(self) -> None:
        """Locks the directory, and cleans up what killed saves left.

        Raises:
          RuntimeError: Another process or checkpointer writes to the directory.
          OSError: The directory cannot be created, or written to.
        """
        if self._lock.is_held():
            return
        os.makedirs(self.directory, exist_ok=True)
        self._lock.acquire()
        try:
            for entry in list(os.scandir(self.directory)):
                if is_step_name(entry.name):
                    _require_replaceable(entry)
            _storage.clean_up(self.directory)
        except BaseException:
            self._lock.release()
            raise

    def _for_later_steps(self, step: int, act: Callable[[int], None]) -> None:
        """Calls a function in the first process for each later checkpoint, the last one first."""

        def work() -> None:
            for later_step in reversed(self.steps()):
                if later_step > step:
                    act(later_step)

        _processes.main_group.call_on_first(work)

    def _remove(self, step: int) -> None:
        """Removes a checkpoint. A kill leaves it complete, or not under its name."""
        _storage.undo_interrupted_replace(self._target(step))
        _storage.remove(self._target(step))

    def _remove_surplus(self) -> None:
        """Removes all checkpoints but the best one and the newest `keep`."""
        if self.keep is None:
            return
        best = best_step(self._monitored_values(), self._sign)
        for step in self.steps()[: -self.keep]:
            if step != best:
                self._remove(step)

    def _monitored_values(self) -> dict[int, float]:
        """Returns the values of `monitor=` by step, NaN where none was saved."""
        if self.monitor is None:
            return {}
        with self._monitored_lock:
            steps = set(self.steps())
            if self._monitored is None:
                self._monitored = {}
                for step in steps:
                    # A damaged checkpoint has no value, and so is never best.
                    with contextlib.suppress(CheckpointCorruptError, ValueError, OSError):
                        path = _storage.find_checkpoint(self._target(step))
                        values = _manifest.read_manifest(path)["values"]
                        self._monitored[step] = values.get(self.monitor, math.nan)
            return {step: x for step, x in self._monitored.items() if step in steps}


def find_checkpoints(path: str | os.PathLike[str], expected: str) -> tuple[str, list[str]]:
    """Returns a real path, and the checkpoints in it, oldest first; or itself if there are none."""
    path = _storage.find_checkpoint(os.path.realpath(path), expected)
    checkpoints = []
    for step in Checkpointer(path).steps() if os.path.isdir(path) else []:
        checkpoints.append(_storage.find_checkpoint(os.path.join(path, f"{step:012d}")))
    return path, checkpoints or [path]


def best_step(values: Mapping[int, float], sign: float) -> int | None:
    """Returns the step with the best value, the first of equal ones. NaN is never best.

    Args:
      values: Values by step.
      sign: 1.0 if less is better, -1.0 if more is better.
    """
    numbers = {step: sign * x for step, x in values.items() if not math.isnan(x)}
    return min(sorted(numbers), key=numbers.__getitem__, default=None)


def _as_position(state: PyTree, position: Position | int | None) -> Position:
    if position is None:
        step: Any = getattr(state, "step", None)
        advice = "Pass one, because the state has no step."
        require(step is not None, "position", "a functrain.Position or a step", None, advice)
        position = int(step)
    return Position(int(position)) if is_integer(position, 0) else require_position(position)


def _require_replaceable(entry: os.DirEntry[str]) -> None:
    """Raises FileExistsError if something else than a checkpoint has the name of a step."""
    is_folder = entry.is_dir(follow_symlinks=False)
    is_empty_folder = is_folder and not os.listdir(entry.path)
    if not is_empty_folder and not is_checkpoint(entry.path):
        content = "folder of something else" if is_folder else "file or link"
        raise FileExistsError(
            f"{entry.path}: expected a checkpoint, got a {content} under the name of a step. Move "
            "it away."
        )


class _Writer:
    """Runs one task at a time in a thread. The next `wait` raises its error.

    The interpreter exits only when the task has ended, so a script may end during a save.
    """

    def __init__(self) -> None:
        self._task: futures.Future[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, work: Callable[[], None]) -> None:
        """Starts a task. The previous one has been waited for."""

        def run() -> None:
            self._thread = threading.current_thread()
            work()

        # The interpreter waits at exit for the threads of executors, even after a shutdown.
        executor = futures.ThreadPoolExecutor(1, "functrain checkpoint")
        self._task = executor.submit(run)
        executor.shutdown(wait=False)
        _unfinished.add(self)

    def wait(self) -> None:
        """Waits for the current task, and raises its error."""
        task = self._task
        # The garbage collector may close an abandoned run in the writer's thread, which must not
        # wait for itself.
        if task is None or threading.current_thread() is self._thread:
            return
        futures.wait([task])
        if self._task is task:  # otherwise another thread has waited, and started the next one
            self._task = self._thread = None
            _unfinished.discard(self)
        task.result()


_unfinished: set[_Writer] = set()


@atexit.register  # runs after the threads of executors have ended
def _report_failures() -> None:
    """Prints the errors of saves whose `wait` was never called."""
    for writer in list(_unfinished):
        try:
            writer.wait()
        except BaseException:
            print("functrain: a checkpoint could not be written:", file=sys.stderr)
            traceback.print_exc()
