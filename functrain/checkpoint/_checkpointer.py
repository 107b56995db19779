"""Saving a training now and then, and finding out where to go on."""

import os
from collections.abc import Mapping
from typing import Any, Self

from functrain.checkpoint._directory import Directory
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._processes import all_or_none
from functrain.checkpoint._series import Restored, Series
from functrain.checkpoint._single import STATE
from functrain.checkpoint._store import verify
from functrain.common import _direction, _repr
from functrain.common._checks import is_whole
from functrain.common._types import PyTree
from functrain.engine._position import Position, require_position
from functrain.engine._trigger import Trigger
from functrain.engine._trigger import every as every_


class Checkpointer:
    """Saves a training now and then, into a directory with one checkpoint for each step.

    Pass it to `functrain.fit`, `functrain.run` or `bridge.fit`, which go on from its last
    checkpoint where there is one; or save and restore by hand.

    While a checkpoint is written, training goes on: it waits for the state to be in the memory of
    the host, and, if the one before it is still being written, for that. A checkpoint has its name
    only when it is whole, and every leaf has a digest: damaged bytes are never returned.

    Where there are several processes (`jax.distributed`), all of them make one, with a directory
    that all of them see, and call its methods alike: each writes its parts of the arrays.

    Args:
      directory: A local one. Made when something is saved.
      every: A trigger; at the end of each epoch by default.
      keep: How many to keep, the newest; None for all. The best one is kept beside them.
      best: Name of a value, such as ``"val_loss"``, whose best checkpoint is kept. An epoch that
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
        sign = 1.0 if best is None else _direction.sign(best, mode)
        self.monitor, self.budget = best, budget
        self.series = Series(Directory(directory), keep, monitor=best, sign=sign, budget=budget)

    @property
    def left_out(self) -> int:
        """How many were due, and not saved: the budget did not allow it."""
        return self.series.left_out

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return self.series.directory.path

    def __repr__(self) -> str:
        parts = {"directory": self.directory, "every": self.when, "keep": self.series.keep}
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
        return self.series.directory.steps()

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
        return self.series.best()

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
        with all_or_none():
            at = _position(state, position)
            later = [step for step in self.steps() if step > at.step]
            if later:
                raise ValueError(
                    f"{self.directory}: expected to save a step after {later[-1]}, the last "
                    f"there is, got {at.step}. To go on from an earlier one: rollback({at.step})."
                )
        trees, known, others = {STATE: state}, dict(values or {}), dict(documents or {})
        self.series.write(trees, at, known, others, copy=not wait)
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
        return self.series.read(lambda about: {STATE: like}, step)[0]

    def verify(self, step: int | None = None) -> dict[int, str]:
        """Reads checkpoints, and compares every leaf and every file with its digest.

        Args:
          step: Which; None for all.

        Returns:
          What is wrong, by step: empty if all is well.
        """
        self.wait()
        found: dict[int, str] = {}
        for n in self.steps() if step is None else [step]:
            try:
                verify(self.series.directory.at(n))
            except (CheckpointCorruptError, CheckpointMismatchError, FileNotFoundError) as error:
                if step is None and n not in self.steps():
                    continue  # its writer has removed it meanwhile
                if not isinstance(error, CheckpointCorruptError):
                    raise
                found[n] = str(error)
        return found

    def rollback(self, step: int) -> None:
        """Removes all checkpoints of later steps, to go on from this one.

        Raises:
          FileNotFoundError: There is no checkpoint of this step.
          CheckpointCorruptError: It is damaged; nothing was removed.
          RuntimeError: Somebody else writes to the directory.
        """
        self.series.rollback(step)

    def wait(self) -> None:
        """Waits for what is being written, and raises what went wrong."""
        self.series.writing.wait()

    def close(self) -> None:
        """Waits for what is being written, and lets others write. It may be used again."""
        try:
            self.wait()
        finally:
            if not self.series.writing.is_busy:  # Ctrl-C, twice: the lock goes with the process
                self.series.directory.lock.release()


def _position(state: PyTree, position: Position | int | None) -> Position:
    if position is None and (step := getattr(state, "step", None)) is not None:
        position = int(step)
    if position is None:
        raise ValueError(
            "position: expected a functrain.Position or a step, since the state has none, got None"
        )
    return Position(int(position)) if is_whole(position, 0) else require_position(position)
