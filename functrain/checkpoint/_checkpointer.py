"""Saving a training now and then, and finding out where to go on."""

import datetime
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from functrain.checkpoint import _fingerprint
from functrain.checkpoint._about import read_about
from functrain.checkpoint._background import Background
from functrain.checkpoint._directory import Directory, best_of
from functrain.checkpoint._documents import DOCUMENTS, decode, encode
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._leaves import by_path, on_host
from functrain.checkpoint._single import STATE, read_trees
from functrain.checkpoint._store import blanks, read_arrays, verify_arrays, write
from functrain.common import _direction, _repr
from functrain.common._checks import is_whole
from functrain.common._types import PyTree
from functrain.engine._position import Position, require_position
from functrain.engine._trigger import Trigger
from functrain.engine._trigger import every as every_


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


class Checkpointer:
    """Saves a training now and then, into a directory with one checkpoint for each step.

    Pass it to `functrain.fit`, `functrain.run` or `bridge.fit`, which go on from its last
    checkpoint where there is one; or save and restore by hand.

    While a checkpoint is written, training goes on: it waits for the state to be in the memory of
    the host, and, if the one before it is still being written, for that. A checkpoint has its name
    only when it is whole, and every leaf has a digest: damaged bytes are never returned.

    Args:
      directory: A local one, or one that all processes share. Made when something is saved.
      every: A trigger; at the end of each epoch by default.
      keep: How many to keep, the newest; None for all. The best one is kept beside them.
      best: Name of a value, such as ``"val_loss"``, whose best checkpoint is kept. An epoch that
        is the best so far is saved, due or not. NaN is never best.
      mode: ``"min"`` or ``"max"``, which is better; ``"auto"`` takes it from the name.
      budget: Share of the time that saving may take, such as 0.1: what is due earlier is left out
        and counted in `left_out`; the end of a run never is. None saves whatever is due.

    Attributes:
      left_out: How many were due, and not saved.

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
        every: Trigger | None = None,
        keep: int | None = 3,
        best: str | None = None,
        mode: _direction.Mode = "auto",
        budget: float | None = None,
    ) -> None:
        if keep is not None and not is_whole(keep, 1):
            raise ValueError(f"keep: expected a whole number from 1 on, or None, got {keep!r}")
        if budget is not None and not 0 < budget <= 1:
            raise ValueError(f"budget: expected a share above 0, 1 at the most, got {budget!r}")
        self.when: Trigger = every_(epochs=1) if every is None else every
        if not callable(getattr(self.when, "next_step", None)):
            raise ValueError(
                f"every: expected a trigger, such as functrain.every(steps=1000), got {every!r}"
            )
        self.monitor = best
        self._sign = 1.0 if best is None else _direction.sign(best, mode)
        self._keep, self._budget = keep, budget
        self._directory = Directory(directory)
        self._writing = Background()
        self._known: dict[int, float] | None = None  # values of the monitor, by step
        self._knowing = threading.Lock()
        self._ended, self._took = -float("inf"), 0.0
        self.left_out = 0

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return self._directory.path

    def __repr__(self) -> str:
        parts = {"directory": self.directory, "every": self.when, "keep": self._keep}
        best = {} if self.monitor is None else {"best": self.monitor}
        return _repr.call(self, **parts, **best)

    def __enter__(self) -> Self:
        """Returns itself; the exit closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for what is being written."""
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps of which there are checkpoints, in order."""
        return self._directory.steps()

    def latest(self) -> int | None:
        """Returns the last step of which there is a checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the step whose value of `best=` is the best; None if no value was saved.

        Raises:
          ValueError: There is no `best=`.
        """
        if self.monitor is None:
            raise ValueError(
                "best: expected the name of a value, Checkpointer(..., best='val_loss'), got None."
            )
        return best_of(self._values(), self._sign)

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
        at = _position(state, position)
        later = [step for step in self.steps() if step > at.step]
        if later:
            raise ValueError(
                f"{self.directory}: expected to save a step after {self.latest()}, the last "
                f"there is, got {at.step}. To go on from an earlier one: rollback({at.step})."
            )
        self.write({STATE: state}, at, dict(values or {}), dict(documents or {}))
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
        return self.read(lambda about: {STATE: like}, step)[0]

    def verify(self, step: int | None = None) -> dict[int, str]:
        """Reads checkpoints, and compares every leaf with its digest.

        Args:
          step: Which; None for all.

        Returns:
          What is wrong, by step: empty if all is well.
        """
        self.wait()
        found: dict[int, str] = {}
        for n in self.steps() if step is None else [step]:
            try:
                verify(self._directory.at(n))
            except CheckpointCorruptError as error:
                found[n] = str(error)
        return found

    def rollback(self, step: int) -> None:
        """Removes all checkpoints of later steps, to go on from this one.

        Raises:
          FileNotFoundError: There is no checkpoint of this step.
          CheckpointCorruptError: It is damaged; nothing was removed.
          RuntimeError: Somebody else writes to the directory.
        """
        self.wait()
        self._directory.require_writable()
        verify(self._directory.at(step))  # or nothing whole might be left
        for later in reversed(self.steps()):
            if later > step:
                self._directory.remove(later)
        self._known = None

    def wait(self) -> None:
        """Waits for what is being written, and raises what went wrong."""
        self._writing.wait()

    def close(self) -> None:
        """Waits for what is being written, and lets others write. It may be used again."""
        try:
            self.wait()
        finally:
            if not self._writing.is_busy:  # Ctrl-C, twice: the lock goes when the process does
                self._directory.release()

    # What runs use.

    def begin(self) -> None:
        """Makes sure before a run that checkpoints can be written."""
        self._directory.require_writable()

    def is_improved(self, values: Mapping[str, float]) -> bool:
        """Whether the value of `best=` is better than any saved."""
        if self.monitor is None or self.monitor not in values:
            return False
        found = self._values()
        now = max(found, default=0) + 1
        return best_of({**found, now: float(values[self.monitor])}, self._sign) == now

    def is_affordable(self) -> bool:
        """Whether the budget allows to save now; else it is counted as left out."""
        if self._budget is None:
            return True
        if self._writing.is_busy or time.perf_counter() - self._ended < self._took / self._budget:
            self.left_out += 1
            return False
        return True

    def write(
        self,
        trees: Mapping[str, PyTree],
        position: Position,
        values: Mapping[str, float],
        documents: Mapping[str, Any],
        **about: Any,
    ) -> None:
        """Begins to write a checkpoint; waits for its arrays to be in the memory of the host.

        Args:
          trees: By name in the file: `state`, and what else is of a structure known later.
          position: How far the training has come.
          values: What is known of this moment.
          documents: What else there is, of any structure.
          **about: What to say of it in words.
        """
        self.wait()
        self._directory.require_writable()
        known = {name: float(x) for name, x in values.items()}
        began = time.perf_counter()
        arrays = {n: x for name, tree in trees.items() for n, x in by_path(tree, name).items()}
        encoded = {n: encode(x, f"{DOCUMENTS}/{n}", arrays) for n, x in documents.items()}
        leaves = on_host(arrays)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        said = {
            "step": position.step,
            "position": position._asdict(),
            "saved_at": now,
            "values": encode(known, "values", {}),
            **about,
            "trees": list(trees),
            "run": _fingerprint.of_run(trees.get(STATE)),
            "documents": encoded,
        }

        def work() -> None:
            try:
                write(self._directory.staged(position.step), leaves, said)
                self._directory.put(position.step)
                self._note(position.step, known)
                self._remove_old()
            finally:
                self._ended = time.perf_counter()
                self._took = self._ended - began

        self._writing.start(work)

    def read(
        self, likes: Callable[[dict[str, Any]], Mapping[str, PyTree]], step: int | None = None
    ) -> tuple[Restored, dict[str, PyTree], dict[str, Any]]:
        """Loads a checkpoint.

        Args:
          likes: Given what it says of itself, returns the structures to load into, by name.
          step: Which; None for the last one that is not damaged.

        Returns:
          What was saved, the trees by name, and what the checkpoint says of itself.
        """
        self.wait()
        wanted = [step] if step is not None else self.steps()[::-1]
        if not wanted:
            raise FileNotFoundError(f"{self.directory}: expected a checkpoint, got none.")
        reasons: list[str] = []
        for n in wanted:
            before = self._directory.identity(n)
            try:
                found = self._read(self._directory.at(n), likes)
            except (CheckpointCorruptError, CheckpointMismatchError, FileNotFoundError) as error:
                now = self._directory.identity(n)
                if now != before or (step is None and not now):
                    return self.read(likes, step)  # its writer has removed or replaced it
                if step is not None or not isinstance(error, CheckpointCorruptError):
                    raise
                reasons.append(str(error))
                continue
            for reason in reasons:
                warnings.warn(f"Passed over, for step {n}: {reason}", stacklevel=3)
            return found
        raise CheckpointCorruptError(
            f"{self.directory}: expected a checkpoint that is whole, but all are damaged:\n"
            + "\n".join(reasons)
        )

    def set_aside_after(self, step: int) -> None:
        """Takes checkpoints of later steps, which are damaged, off the list."""
        for later in self.steps():
            if later > step:
                self._directory.set_aside(later)

    def _read(
        self, directory: str, likes: Callable[[dict[str, Any]], Mapping[str, PyTree]]
    ) -> tuple[Restored, dict[str, PyTree], dict[str, Any]]:
        about = read_about(directory)
        wanted = dict(likes(about))
        names = [n for n in about["leaves"] if n.partition("/")[0] == DOCUMENTS]
        arrays = read_arrays(directory, about, blanks(about, names))
        documents = {n: decode(x, arrays) for n, x in about.get("documents", {}).items()}
        trees = read_trees(directory, about, wanted)
        position = Position(**about.get("position", {"step": about.get("step", 0)}))
        values = decode(about.get("values", {}), {})
        return Restored(trees.get(STATE), position, values, documents), trees, about

    def _values(self) -> dict[int, float]:
        with self._knowing:
            if self._known is None:
                found = ((n, decode(x.get("values", {}), {})) for n, x in self._directory.abouts())
                self._known = {n: x[self.monitor] for n, x in found if self.monitor in x}
            there = set(self.steps())
            return {step: x for step, x in self._known.items() if step in there}

    def _note(self, step: int, values: Mapping[str, float]) -> None:
        with self._knowing:
            if self._known is not None:
                self._known.pop(step, None)
                if self.monitor is not None and self.monitor in values:
                    self._known[step] = values[self.monitor]

    def _remove_old(self) -> None:
        if self._keep is None:
            return
        kept = set(self.steps()[-self._keep :])
        if self.monitor is not None and (best := self.best()) is not None:
            kept.add(best)
        for step in self.steps():
            if step not in kept:
                self._directory.remove(step)


def verify(directory: str) -> None:
    """Reads a checkpoint, and compares every digest.

    Raises:
      CheckpointCorruptError: Names what is wrong.
    """
    verify_arrays(directory, read_about(directory))


def _position(state: PyTree, position: Position | int | None) -> Position:
    if is_whole(position, 0):
        return Position(int(position))
    if position is None and (step := getattr(state, "step", None)) is not None:
        return Position(int(step))
    if position is None:
        raise ValueError(
            "position: expected a functrain.Position or a step, since the state has none, got None"
        )
    return require_position(position)
