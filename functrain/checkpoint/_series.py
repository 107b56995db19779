"""The checkpoints of one training, as a run uses them: written behind its back, read again."""

import dataclasses
import datetime
import functools
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from functrain.checkpoint import _fingerprint, _together
from functrain.checkpoint._about import read_about
from functrain.checkpoint._background import Background
from functrain.checkpoint._directory import Directory, best_of
from functrain.checkpoint._documents import DOCUMENTS, decode, encode
from functrain.checkpoint._errors import CheckpointCorruptError
from functrain.checkpoint._leaves import blank, by_path, on_host, require_same, root_of
from functrain.checkpoint._place import identity, write_whole
from functrain.checkpoint._processes import all_or_none, are_several, is_first, on_first, those_with
from functrain.checkpoint._single import STATE, read
from functrain.checkpoint._store import require_sensible_size, verify
from functrain.common import _repr
from functrain.common._types import PyTree
from functrain.common._values import spread
from functrain.engine._position import Position


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
        return f"Restored(state={_repr.state(self.state)}, position={self.position}, {known})"


@dataclasses.dataclass(eq=False, repr=False)
class Series:
    """One checkpoint for each step: one writer, a thread that writes, and what is kept.

    Args:
      directory: Where they are.
      keep: How many to keep, the newest; None for all.
      monitor: Name of the value whose best checkpoint is kept beside them, or None.
      sign: 1.0 where less of it is better, -1.0 where more is.
      budget: Share of the time that saving may take; None for any.

    Attributes:
      left_out: How many were due, and not saved.
      writing: What is being written.
    """

    directory: Directory
    keep: int | None
    monitor: str | None
    sign: float
    budget: float | None

    def __post_init__(self) -> None:
        self.left_out = 0
        self.writing = Background()
        self._known: dict[int, float] | None = None  # values of the monitor, by step
        self._knowing = threading.Lock()
        self._ended, self._took = -math.inf, 0.0

    def best(self) -> int | None:
        """Returns the step whose value is the best; None if none has one."""
        return best_of(self._values(), self.sign)

    def rollback(self, step: int) -> None:
        """Removes all checkpoints of later steps; see `Checkpointer.rollback`."""
        self.writing.wait()
        on_first(self.directory.require_writable)
        with all_or_none():
            verify(self.directory.at(step))  # or nothing whole might be left
        self._have_first(self.directory.remove, step)
        self._known = None

    def set_aside_after(self, step: int) -> None:
        """Takes checkpoints of later steps, which are damaged, off the list."""
        self._have_first(self.directory.set_aside, step)

    def _have_first(self, act: Callable[[int], None], after: int) -> None:
        """Has the first process do something to the checkpoints of later steps, the last first."""

        def work() -> None:
            for step in reversed(self.directory.steps()):
                if step > after:
                    act(step)

        on_first(work)

    def begin(self) -> None:
        """Makes sure before a run that checkpoints can be written, to where all processes see."""
        on_first(self.directory.require_writable)
        if are_several():
            _together.require_same_steps(self.directory)

    def is_improved(self, values: Mapping[str, Any]) -> bool:
        """Whether the value of `best=` is better than any saved."""
        known = spread(values)
        if self.monitor is None or self.monitor not in known:
            return False
        if are_several():  # or some might know of what is being written, and others not
            self.writing.wait()
        found = self._values()
        now = max(found, default=0) + 1
        return best_of({**found, now: known[self.monitor]}, self.sign) == now

    def is_affordable(self) -> bool:
        """Whether the budget allows to save now; else it is counted as left out."""
        if self.budget is None:
            return True
        is_busy = self.writing.is_busy  # asked first: it may end meanwhile
        if is_busy or time.perf_counter() - self._ended < self._took / self.budget:
            self.left_out += 1
            return False
        return True

    def write(
        self,
        trees: dict[str, PyTree],
        position: Position,
        values: Mapping[str, Any],
        documents: Mapping[str, Any],
        *,
        copy: bool,
        **about: Any,
    ) -> None:
        """Begins to write a checkpoint; waits for its arrays to be in the memory of the host.

        Args:
          trees: By name in the file: `state`, and what else is of a structure known later.
          position: How far the training has come.
          values: What is known of this moment.
          documents: What else there is, of any structure.
          copy: Whether programs may take over the memory of the trees before it is written.
          **about: What to say of it in words.
        """
        self.writing.wait()
        known = spread(values)
        began = time.perf_counter()
        with all_or_none():
            arrays = by_path(trees)
            encoded = {n: encode(x, f"{DOCUMENTS}/{n}", arrays) for n, x in documents.items()}
            leaves = on_host(arrays, copy=copy)
        said = {
            "step": position.step,
            "position": position._asdict(),
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "values": encode(known, "values", {}),
            **about,
            "trees": list(trees),
            "run": _fingerprint.of_run(trees.get(STATE)),
            "documents": encoded,
        }
        target = self.directory.place(position.step)
        if are_several():
            end = _together.begin(target, leaves, self.directory.require_writable)
        else:
            self.directory.require_writable()
            end = functools.partial(write_whole, target, leaves)

        def work() -> None:
            try:
                end(said)
                self._note(position.step, known)
                if is_first():
                    self._remove_old()
            finally:
                self._ended = time.perf_counter()
                self._took = self._ended - began

        self.writing.start(work)

    def read(
        self, likes: Callable[[dict[str, Any]], dict[str, PyTree]], step: int | None = None
    ) -> tuple[Restored, dict[str, PyTree], dict[str, Any]]:
        """Loads a checkpoint.

        Args:
          likes: Given what it says of itself, returns the structures to load into, by name.
          step: Which; None for the last one that is not damaged.

        Returns:
          What was saved, the trees by name, and what the checkpoint says of itself.
        """
        self.writing.wait()
        wanted = [step] if step is not None else on_first(self.directory.steps)[::-1]
        if not wanted:
            raise FileNotFoundError(f"{self.directory.path}: expected a checkpoint, got none.")
        reasons: list[str] = []
        for n in wanted:
            before = identity(self.directory.place(n))
            failure: Exception | None = None
            try:
                found = self._read(n, likes)
            except Exception as error:
                failure = error
            now = identity(self.directory.place(n))
            gone = now != before or (step is None and not now)
            if failure is not None and gone and not are_several():
                return self.read(likes, step)  # its writer has removed or replaced it
            if (elsewhere := those_with(failure is not None)) and failure is None:
                failure = CheckpointCorruptError(f"process {elsewhere[0]} could not read step {n}")
            if failure is None:
                for reason in reasons:
                    warnings.warn(f"Passed over, for step {n}: {reason}", stacklevel=3)
                return found
            if step is not None or those_with(not isinstance(failure, CheckpointCorruptError)):
                raise failure
            reasons.append(str(failure))
        raise CheckpointCorruptError(
            f"{self.directory.path}: expected a checkpoint that is whole, but all are damaged:\n"
            + "\n".join(reasons)
        )

    def _read(
        self, step: int, likes: Callable[[dict[str, Any]], dict[str, PyTree]]
    ) -> tuple[Restored, dict[str, PyTree], dict[str, Any]]:
        with all_or_none():  # Orbax reads together
            directory = self.directory.at(step)
            about = read_about(directory)
            wanted = likes(about)
            require_same(directory, about, wanted)
        names = [n for n in about["leaves"] if root_of(n) == DOCUMENTS]
        state_bytes = sum(like.nbytes for like in map(blank, by_path(wanted).values()))
        require_sensible_size(directory, about, names, state_bytes)
        trees, arrays = read(directory, about, wanted, names)
        documents = {n: decode(x, arrays) for n, x in about["documents"].items()}
        position = Position(**about.get("position", {"step": about.get("step", 0)}))
        return Restored(trees.get(STATE), position, about["values"], documents), trees, about

    def _values(self) -> dict[int, float]:
        """Returns the values of the monitor by step, NaN where there was none."""
        if self.monitor is None:
            return {}
        with self._knowing:
            if self._known is None:
                found = ((n, about["values"]) for n, about in self.directory.abouts())
                self._known = {n: x.get(self.monitor, math.nan) for n, x in found}
            there = set(self.directory.steps())
            return {step: x for step, x in self._known.items() if step in there}

    def _note(self, step: int, values: Mapping[str, float]) -> None:
        with self._knowing:
            if self._known is not None and self.monitor is not None:
                self._known[step] = values.get(self.monitor, math.nan)

    def _remove_old(self) -> None:
        if self.keep is None:
            return
        kept = {*self.directory.steps()[-self.keep :], self.best()}
        for step in self.directory.steps():
            if step not in kept:
                self.directory.remove(step)
