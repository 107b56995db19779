"""The checkpoints of one training: when they are written, which are kept, and which is read."""

import atexit
import contextlib
import datetime
import math
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any, NamedTuple, Self

from functrain.checkpoint import _leaves, _manifest, _processes, _storage
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._manifest import DOCUMENTS, STATE, is_checkpoint, is_step, read_manifest
from functrain.common import _direction, _locks, _repr
from functrain.common._checks import is_integer
from functrain.common._types import PyTree
from functrain.common._values import split_members
from functrain.engine._position import Position, require_position
from functrain.engine._trigger import Every, Trigger, as_trigger

_LOCK, _DAMAGED, _OLD = ".functrain-lock", "damaged-", ".functrain-old"


class Restored(NamedTuple):
    """What `Checkpointer.restore` returns.

    Attributes:
      state: In the structure of what it was given.
      position: How far the training had come.
      values: What was known of that moment, such as ``{"val_loss": 0.3}``.
      documents: What was saved beside it: by a run the history, and what hooks and loader said.

    Examples:
      >>> Restored(state=(), position=Position(step=3), values={}, documents={}).position.step
      3
    """

    state: PyTree
    position: Position
    values: dict[str, float]
    documents: dict[str, Any]

    def __repr__(self) -> str:
        known = f"values={self.values}, documents of {', '.join(self.documents) or 'nothing'}"
        return f"Restored(state={_repr.state_repr(self.state)}, position={self.position}, {known})"


class Checkpointer:
    """Saves a training now and then, into a directory with one checkpoint for each step.

    Pass it to `functrain.fit`, `functrain.run` or `bridge.fit`, which go on from its last
    checkpoint where there is one; or save and restore by hand.

    While a checkpoint is written, training goes on: it waits for the state to be in the memory of
    the host, and, if the one before it is still being written, for that. A checkpoint has its name
    only when it is whole, and all bytes have digests: damaged ones are never returned.

    Where there are several processes (`jax.distributed`), all of them make one, with a directory
    that all of them see, and call its methods alike: each writes its parts of the arrays.

    Args:
      directory: A local one. Made when something is saved.
      every: A number of steps, or a trigger such as ``ft.every(seconds=600)``; at the end of each
        epoch by default.
      keep: How many to keep, the newest; None for all. The best one is kept beside them.
      monitor: Name of a value, such as ``"val_loss"``, whose best checkpoint is kept. An epoch that
        is the best so far is saved, due or not. NaN is never best.
      mode: ``"min"`` or ``"max"``, which is better; ``"auto"`` takes it from the name.
      budget: Share of the time that saving may take, such as 0.1: what is due earlier is left out
        and counted in `left_out`; the end of a run never is. None saves whatever is due.

    Raises:
      ValueError: An argument makes no sense.
      FileExistsError: `directory` is a file.

    Examples:
      >>> import jax.numpy as jnp, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with Checkpointer(folder, keep=2) as checkpoints:
      ...         for step in (10, 20, 30):
      ...             checkpoints.save({"w": jnp.full(2, step)}, Position(step))
      ...         found = checkpoints.restore(like={"w": jnp.zeros(2, jnp.int32)})
      ...         print(checkpoints.steps(), found.position.step, found.state["w"])
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
        if keep is not None and not is_integer(keep, 1):
            raise ValueError(f"keep: expected a whole number from 1 on, or None, got {keep!r}")
        if budget is not None and not 0 < budget <= 1:
            raise ValueError(f"budget: expected a share above 0, 1 at the most, got {budget!r}")
        self.every = as_trigger(every, Every(epochs=1))
        self.monitor, self.budget, self.keep, self.left_out = monitor, budget, keep, 0
        self.directory = _storage.local(directory, "directory")
        if os.path.lexists(self.directory) and not os.path.isdir(self.directory):
            raise FileExistsError(
                f"{self.directory}: expected a directory for checkpoints, got a file. Choose "
                "another."
            )
        self._sign = 1.0 if monitor is None else _direction.sign(monitor, mode)
        self._lock = _locks.Lock(os.path.join(self.directory, _LOCK))
        self._writer = _Writer()
        self._turn = threading.RLock()  # held by the thread that begins a save, or removes some
        self._together: _processes.Together | None = None  # for what the thread does
        self._monitored: dict[int, float] | None = None  # values of `monitor=`, by step
        self._monitored_lock = threading.Lock()
        self._last_end, self._last_seconds = -math.inf, 0.0  # of the last save

    def __repr__(self) -> str:
        parts = {"directory": self.directory, "every": self.every, "keep": self.keep}
        monitor = {} if self.monitor is None else {"monitor": self.monitor}
        return _repr.call(self, **parts, **monitor)

    def __enter__(self) -> Self:
        """Returns itself; the exit closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for what is being written."""
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps of which there are checkpoints, in order."""
        if not os.path.isdir(self.directory):
            return []
        names = [x for x in os.listdir(self.directory) if is_step(x.removesuffix(_OLD))]
        paths = {name: os.path.join(self.directory, name) for name in names}
        steps = {int(n.removesuffix(_OLD)) for n, path in paths.items() if is_checkpoint(path)}
        if not all(map(os.path.lexists, paths.values())):
            return self.steps()  # its writer has replaced some meanwhile by others
        return sorted(steps)

    def latest(self) -> int | None:
        """Returns the last step of which there is a checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the step whose value of `monitor=` is the best; None if no value was saved.

        Raises:
          ValueError: There is no `monitor=`.
        """
        if self.monitor is None:
            raise ValueError(
                "monitor: expected the name of a value, Checkpointer(..., monitor='val_loss'), "
                "got None."
            )
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
          position: How far the training has come, or its step; the state's own `step` for None.
          values: What is known of this moment, such as ``{"val_loss": 0.3}``.
          documents: What is to come back beside it: by name, dicts, lists and tuples of numbers,
            texts and arrays.
          wait: False returns when the state is in the memory of the host; what goes wrong after
            that is raised by the next `save`, `wait` or `close`.

        Raises:
          RuntimeError: Somebody else writes to the directory.
          ValueError: There are checkpoints of later steps: `rollback` says that they are to go.
          TypeError: A leaf is no array, or a document holds something else.
          OSError: It cannot be written.
        """
        with self._turn:
            with _processes.main.all_or_none():
                at = _position(state, position)
                later = [step for step in self.steps() if step > at.step]
                if later:
                    raise ValueError(
                        f"{self.directory}: expected to save a step after {later[-1]}, the last "
                        f"there is, got {at.step}. To resume from an earlier one: "
                        f"rollback({at.step})."
                    )
            self._write({STATE: state}, at, values or {}, documents or {}, copy=not wait)
        if wait:
            self.wait()

    def restore(self, like: PyTree, step: int | None = None) -> Restored:
        """Loads a state, into the structure, dtypes and shardings of another.

        Args:
          like: As for `functrain.load`.
          step: Which; None for the last one that is not damaged. One that is damaged is passed
            over with a warning that says what is wrong with it.

        Returns:
          Restored(state, position, values, documents).

        Raises:
          FileNotFoundError: There is none.
          CheckpointMismatchError: It is of another model, optimizer or dtype; each leaf is named.
          CheckpointCorruptError: It is damaged; with `step=None`, all of them are.
        """
        return self._read(lambda manifest: {STATE: like}, step)[0]

    def verify(self, step: int | None = None) -> dict[int, str]:
        """Reads checkpoints, and compares every byte with its digest.

        Args:
          step: Which; None for all.

        Returns:
          What is wrong, by step: empty if all is well.
        """
        self.wait()
        damaged: dict[int, str] = {}
        for n in self.steps() if step is None else [step]:
            try:
                _storage.verify(self._path_of(n))
            except (CheckpointCorruptError, CheckpointMismatchError, FileNotFoundError) as error:
                if step is None and n not in self.steps():
                    continue  # its writer has removed it meanwhile
                if not isinstance(error, CheckpointCorruptError):
                    raise
                damaged[n] = str(error)
        return damaged

    def rollback(self, step: int) -> None:
        """Removes all checkpoints of later steps, to go on from this one.

        Raises:
          FileNotFoundError: There is no checkpoint of this step.
          CheckpointCorruptError: It is damaged; nothing was removed.
          RuntimeError: Somebody else writes to the directory.
        """
        with self._turn:
            self.wait()
            _processes.main.on_first(self._require_writable)
            with _processes.main.all_or_none():
                _storage.verify(self._path_of(step))  # or nothing whole might be left
            self._on_later_steps(step, self._remove)
            self._monitored = None

    def wait(self) -> None:
        """Waits for what is being written, and raises what went wrong."""
        self._writer.wait()

    def close(self) -> None:
        """Waits for what is being written, and lets others write. It may be used again."""
        try:
            self.wait()
        finally:
            if not self._writer.is_busy:  # after a second Ctrl-C, the lock goes with the process
                self._lock.release()

    # What a run uses: `functrain/loop/_saving.py`.

    def _begin(self) -> None:
        """Raises an error unless checkpoints can be written, to where all processes see them."""
        _processes.main.on_first(self._require_writable)
        path, steps = _processes.main.on_first(lambda: [self.directory, self.steps()])
        with _processes.main.all_or_none():
            _processes.require_seen(self.directory, path, lambda: self.steps() == steps)

    def _set_aside_after(self, step: int) -> None:
        """Renames the checkpoints of later steps, which are damaged."""

        def set_aside(later: int) -> None:
            aside = os.path.join(self.directory, f"{_DAMAGED}{later:012d}")
            _storage.remove(aside)
            with contextlib.suppress(OSError):
                os.rename(self._place(later), aside)

        self._on_later_steps(step, set_aside)

    def _is_improved(self, values: Mapping[str, Any]) -> bool:
        """Returns True if the value of `monitor=` is better than any saved."""
        known = split_members(values)
        if self.monitor is None or self.monitor not in known:
            return False
        if _processes.are_several():  # some might know of what is being written, and others not
            self.wait()
        saved = self._monitored_values()
        now = max(saved, default=0) + 1
        return best_step({**saved, now: known[self.monitor]}, self._sign) == now

    def _is_affordable(self) -> bool:
        """Returns True if the budget allows to save now; else counts a save that is left out."""
        if self.budget is None:
            return True
        is_busy = self._writer.is_busy  # asked first: it may end meanwhile
        elapsed = time.perf_counter() - self._last_end
        if is_busy or elapsed < self._last_seconds / self.budget:
            self.left_out += 1
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
        """Begins to write a checkpoint; waits for its arrays to be in the memory of the host.

        Args:
          trees: By name in the file: `state`, and what else has a structure that is known later.
          position: As in `save`.
          values: As in `save`.
          documents: As in `save`.
          copy: Whether programs may take over the memory of the trees before it is written.
          **entries: What else stands in the manifest.
        """
        self.wait()
        begun = time.perf_counter()
        known = split_members(values)
        with _processes.main.all_or_none():
            arrays = _leaves.by_path(trees)
            encoded = {
                n: _manifest.encode(x, f"{DOCUMENTS}/{n}", arrays) for n, x in documents.items()
            }
            leaves = _leaves.on_host(arrays, copy=copy)
        entries = {
            "step": position.step,
            "position": position._asdict(),
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "values": _manifest.encode(known, "values", {}),
            **entries,
            "trees": list(trees),
            "run": _manifest.fingerprint(trees.get(STATE)),
            "documents": encoded,
        }
        _processes.main.on_first(self._require_writable)
        target = self._place(position.step)
        self._together = together = self._together or _processes.together_for_saves()

        def work() -> None:
            try:
                _storage.write(target, leaves, entries, together, self._require_writable)
                with self._monitored_lock:
                    if self._monitored is not None and self.monitor is not None:
                        self._monitored[position.step] = known.get(self.monitor, math.nan)
                if _processes.is_first():
                    self._remove_old()
            finally:
                self._last_end = time.perf_counter()
                self._last_seconds = self._last_end - begun

        self._writer.start(work)

    def _read(
        self, likes: Callable[[dict[str, Any]], dict[str, PyTree]], step: int | None = None
    ) -> tuple[Restored, dict[str, PyTree], dict[str, Any]]:
        """Loads a checkpoint; returns what was saved, the trees by name, and the manifest.

        Args:
          likes: Given the manifest, returns the structures to load into, by name.
          step: Which; None for the last one that is not damaged.
        """
        self.wait()
        wanted = [step] if step is not None else _processes.main.on_first(self.steps)[::-1]
        if not wanted:
            raise FileNotFoundError(f"{self.directory}: expected a checkpoint, got none.")
        reasons: list[str] = []
        for n in wanted:
            before, failure = _storage.identity(self._place(n)), None
            try:
                found = self._read_step(n, likes)
            except Exception as error:
                failure = error
            now = _storage.identity(self._place(n))
            is_gone = now != before or (step is None and not now)
            if failure is not None and is_gone and not _processes.are_several():
                return self._read(likes, step)  # its writer has removed or replaced it
            failures = _processes.main.failures(failure)
            if not failures:
                for reason in reasons:
                    warnings.warn(f"Passed over, for step {n}: {reason}", stacklevel=3)
                return found
            reason = _processes.described(failures)
            kinds = {text.partition(":")[0] for text in failures.values()} - {"OtherProcessError"}
            if step is not None or kinds != {CheckpointCorruptError.__name__}:
                raise failure or _processes.OtherProcessError(reason)
            reasons.append(reason)
        raise CheckpointCorruptError(
            f"{self.directory}: expected a checkpoint that is whole, but all are damaged:\n"
            + "\n".join(reasons)
        )

    def _read_step(
        self, step: int, likes: Callable[[dict[str, Any]], dict[str, PyTree]]
    ) -> tuple[Restored, dict[str, PyTree], dict[str, Any]]:
        directory = self._path_of(step)
        manifest = read_manifest(directory)
        names = [name for name in manifest["leaves"] if _leaves.root_of(name) == DOCUMENTS]
        trees, arrays = _storage.read(directory, manifest, likes(manifest), names)
        with _manifest.understood(f"{directory}: expected a position and documents"):
            documents = {
                name: _manifest.decode(x, arrays) for name, x in manifest["documents"].items()
            }
            position = Position(**manifest.get("position", {"step": manifest.get("step", 0)}))
        return Restored(trees.get(STATE), position, manifest["values"], documents), trees, manifest

    # The directories of the steps, such as `000000001200`: only whole checkpoints have such names.

    def _place(self, step: int) -> str:
        """Returns where a step's checkpoint stands."""
        return os.path.join(self.directory, f"{step:012d}")

    def _path_of(self, step: int) -> str:
        """Returns where a step's checkpoint is found; raises FileNotFoundError if there is none."""
        if step not in (steps := self.steps()):
            raise FileNotFoundError(
                f"{self.directory}: expected a checkpoint of step {step}, got those of steps "
                f"{steps or 'none'}."
            )
        return _storage.find(self._place(step))

    def _require_writable(self) -> None:
        """Takes the lock, and puts in order what a kill left.

        Raises:
          RuntimeError: Somebody else writes here.
          OSError: The directory cannot be made, or written to.
        """
        if self._lock.is_held():
            return
        os.makedirs(self.directory, exist_ok=True)
        self._lock.acquire()
        try:
            for entry in list(os.scandir(self.directory)):
                is_folder = entry.is_dir(follow_symlinks=False)
                is_free = is_folder and not os.listdir(entry.path)
                if is_step(entry.name) and not is_free and not is_checkpoint(entry.path):
                    raise FileExistsError(
                        f"{entry.path}: expected a checkpoint, got a "
                        f"{'folder of something else' if is_folder else 'file or link'} under the "
                        "name of a step. Move it away."
                    )
            _storage.tidy(self.directory)
        except BaseException:
            self._lock.release()
            raise

    def _on_later_steps(self, step: int, act: Callable[[int], None]) -> None:
        """Has the first process do something to all later checkpoints, the last one first."""

        def work() -> None:
            for later in reversed(self.steps()):
                if later > step:
                    act(later)

        _processes.main.on_first(work)

    def _remove(self, step: int) -> None:
        """Removes a checkpoint; a kill leaves it whole, or not under its name."""
        _storage.take_back(self._place(step))
        _storage.remove(self._place(step))

    def _remove_old(self) -> None:
        if self.keep is not None:
            kept = {*self.steps()[-self.keep :], best_step(self._monitored_values(), self._sign)}
            for step in self.steps():
                if step not in kept:
                    self._remove(step)

    def _monitored_values(self) -> dict[int, float]:
        """Returns the values of `monitor=` by step, NaN where there was none."""
        if self.monitor is None:
            return {}
        with self._monitored_lock:
            if self._monitored is None:
                self._monitored = {}
                for step in self.steps():
                    with contextlib.suppress(CheckpointCorruptError, ValueError, OSError):
                        values = read_manifest(_storage.find(self._place(step)))["values"]
                        self._monitored[step] = values.get(self.monitor, math.nan)
            there = set(self.steps())
            return {step: x for step, x in self._monitored.items() if step in there}


def best_step(values: Mapping[int, float], sign: float) -> int | None:
    """Returns the step with the best value, the first of equals; NaN is never best."""
    numbers = {step: sign * x for step, x in values.items() if not math.isnan(x)}
    return min(sorted(numbers), key=numbers.__getitem__, default=None)


def _position(state: PyTree, position: Position | int | None) -> Position:
    if position is None and (step := getattr(state, "step", None)) is not None:
        position = int(step)
    if position is None:
        raise ValueError(
            "position: expected a functrain.Position or a step, since the state has none, got None"
        )
    return Position(int(position)) if is_integer(position, 0) else require_position(position)


class _Writer:
    """One piece of work at a time, in a thread. What goes wrong is raised by the next `wait`.

    The interpreter does not end before the work has: a script may end with a save under way.
    """

    def __init__(self) -> None:
        self._work: futures.Future[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._work is not None and not self._work.done()

    def start(self, work: Callable[[], None]) -> None:
        """Begins a piece of work; the one before it has been waited for."""

        def act() -> None:
            self._thread = threading.current_thread()
            work()

        pool = futures.ThreadPoolExecutor(1, "functrain checkpoint")
        self._work = pool.submit(act)
        pool.shutdown(wait=False)
        _unfinished.add(self)

    def wait(self) -> None:
        """Waits for the work under way, and raises what went wrong."""
        work = self._work
        if work is None or threading.current_thread() is self._thread:
            return  # in its own thread the garbage collector came by
        futures.wait([work])
        if self._work is work:  # else another thread has waited, too, and begun another
            self._work = self._thread = None
            _unfinished.discard(self)
        work.result()


_unfinished: set[_Writer] = set()


@atexit.register  # the threads have ended by then
def _report_failures() -> None:
    for writer in list(_unfinished):
        try:
            writer.wait()
        except BaseException:
            print("functrain: a checkpoint could not be written:", file=sys.stderr)
            traceback.print_exc()
