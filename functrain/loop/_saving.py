"""A run that saves itself: what, when, and where it goes on."""

import dataclasses
import signal
import time
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Protocol, Self

from functrain.checkpoint._checkpointer import Checkpointer
from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._manifest import differences, fingerprint
from functrain.checkpoint._processes import is_multiprocess
from functrain.checkpoint._processes import main_group as processes
from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.common._values import split_members
from functrain.data._batches import Batches
from functrain.engine._position import Position
from functrain.engine._signals import DeferredSignals
from functrain.loop import _preemption
from functrain.loop._events import EpochEnd, Event


class Part(Protocol):
    """What goes on with a run: a history, hooks."""

    def state(self) -> Any:
        """Returns what to save: nested numbers, texts and arrays."""

    def restore(self, state: Any) -> None:
        """Puts it back."""


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run goes on.

    Attributes:
      state: The state to go on with; of a training that is over, its result.
      metrics: In mid-epoch, those of the epoch so far; else None.
      position: Where that is.
      values: What was known of that moment.
      epoch_end_is_pending: True if the event of the epoch's end has not been sent yet.
      nothing_left: Whether that was the end of the last epoch: but the end of the run is left.
      finished: Whether the run is over.
      stopped: Whether a hook has stopped it.
    """

    state: PyTree
    metrics: PyTree
    position: Position
    values: dict[str, Any]
    epoch_end_is_pending: bool
    nothing_left: bool
    finished: bool
    stopped: bool
    directory: str

    def said(self) -> str:
        """Returns where it goes on, in words."""
        steps, where = f"{self.position.step:,} steps", self.directory
        if not self.finished:
            return f"going on after {steps}, in epoch {self.position.epoch + 1}: {where}"
        if self.stopped:
            return (
                f"over already, stopped early after {steps}: {where}. To train on from an earlier "
                "step: Checkpointer.rollback; to begin anew, take another directory."
            )
        return (
            f"over already, after {steps}: {where}. More epochs go on from there; to begin anew, "
            "take another directory."
        )


class Saving:
    """Saves a run when its checkpointer is due, at its end, and when SIGTERM comes.

    Args:
      checkpointer: Where, and when.
      batches: The data.
      parts: What else goes on with the run, by name.
      evaluation: The arguments that make the loop evaluate, for the warning that `best` is missing.

    Attributes:
      trigger: When chunks must end.
      is_together: Whether several processes end together, when `is_asked_to_end` says so.

    Raises:
      TypeError: `checkpointer` is none.
      ValueError: It asks the clock, of which several processes have several.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        batches: Batches,
        parts: Mapping[str, Part],
        evaluation: str = "eval_data and eval_step, or an Evaluate hook",
    ) -> None:
        if not isinstance(checkpointer, Checkpointer):
            raise TypeError(
                "checkpointer: expected a functrain.Checkpointer, such as "
                f"functrain.Checkpointer('run'), got {checkpointer!r}"
            )
        self._checkpointer, self._batches, self._parts = checkpointer, batches, parts
        self._evaluation = evaluation
        _require_no_clock(checkpointer)
        self.trigger, self.is_together = checkpointer.every, _preemption.is_heard()
        terminate: Literal["none", "any"] = "none" if self.is_together else "any"
        self._signals = DeferredSignals(interrupt=False, terminate=terminate)
        self._is_to_end = False
        self._fired = time.perf_counter()
        self._seen_best = checkpointer.monitor is None

    def resume(self, state: PyTree, metrics: PyTree, epochs: int) -> Resumed | None:
        """Finds out where to go on; None for a beginning.

        Args:
          state: Structure, dtypes and shardings of the run's state.
          metrics: Those of its metrics, or None.
          epochs: How many the run is to have.
        """
        checkpointer = self._checkpointer
        checkpointer._prepare()
        if not checkpointer.steps():
            return None

        def likes(about: dict[str, Any]) -> dict[str, PyTree]:
            self._require_same_run(about)
            if "metrics" in about["trees"] and metrics is None:
                raise CheckpointMismatchError(
                    f"{checkpointer.directory}: expected a checkpoint of a step without metrics, "
                    "got one of a step that has some. Nothing was loaded."
                )
            over = _is_finished(about, epochs) and "final" in about["trees"]
            in_midst = {"metrics": metrics} if "metrics" in about["trees"] else {}
            return {"final" if over else "state": state, **in_midst}

        restored, trees, about = checkpointer._read(likes)
        self._require_mesh(about, state)
        position, over = restored.position, about["epoch_over"]
        finished = _is_finished(about, epochs)
        nothing_left = finished or (over and position.epoch + 1 == epochs)
        if over and not nothing_left:
            position = Position(position.step, position.epoch + 1)
        if not nothing_left:
            data = restored.documents["data"]
            with processes.raise_in_all():
                self._require_same_data(self._batches.restore(data, position.epoch, position.batch))
        checkpointer._set_aside_later_steps(restored.position.step)
        self._say_what_differs(about, state)
        for name, part in self._parts.items():
            if name in restored.documents:
                part.restore(restored.documents[name])
        return Resumed(
            trees.get("final", restored.state),
            trees.get("metrics"),
            position,
            restored.values,
            epoch_end_is_pending=not over,
            nothing_left=nothing_left,
            finished=finished,
            stopped=finished and about["done"]["stopped"],
            directory=checkpointer.directory,
        )

    def is_due(self, event: Event) -> bool:
        """Whether to save after an event."""
        epochs = event.epoch + 1 if isinstance(event, EpochEnd) else None
        due = self.trigger.due(event.step, epochs, time.perf_counter() - self._fired)
        if epochs is not None:
            self._look_for_best(event)
            due = due or self._checkpointer._is_improved(event.values)
        return due and self._checkpointer._is_within_budget()

    def save(
        self,
        event: Event,
        trees: dict[str, PyTree],
        *,
        epoch_is_over: bool,
        done: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves the run as it is after an event.

        Args:
          event: The event.
          trees: The state, in mid-epoch the metrics too.
          epoch_is_over: Whether the event of the epoch's end has been sent.
          done: What to say of a run that is over.
        """
        self._fired = time.perf_counter()
        self._seen_best = self._seen_best or self._checkpointer.monitor in split_members(
            event.values
        )
        if done is not None and epoch_is_over:  # of one epoch, this is the first that is seen
            self._look_for_best(event)
        documents = {name: part.state() for name, part in self._parts.items()}
        with self._signals.discard_on_error(), self._checkpointer._save_lock:
            self._checkpointer._write(
                trees,
                event.position,
                event.values,
                {**documents, "data": self._batches.state(epoch_is_over=epoch_is_over)},
                copy=done is None,
                epoch_over=epoch_is_over,
                done=done,
                data=self._batches.fingerprint(),
            )

    def is_asked_to_end(self) -> bool:
        """Whether SIGTERM has come, and this is the moment to end; asked once after each event."""
        if not self._is_to_end:
            if self.is_together:
                self._is_to_end = _preemption.is_time_to_end()
            else:
                self._is_to_end = any(processes.gather(lambda: bool(self._signals.is_pending)))
        return self._is_to_end

    def end(self) -> None:
        """Ends the process with 143, or hands the signal to whoever handled it before."""
        self._is_to_end = False  # a handler of the user's may have the run continue
        with self._signals.discard_on_error():
            self._checkpointer.wait()
        if is_multiprocess():
            raise SystemExit(128 + signal.SIGTERM)
        self._signals.handle_pending()

    def __enter__(self) -> Self:
        """Begins to hold back SIGTERM."""
        self._signals.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Waits for what is being written; lets others write, and handle signals."""
        try:
            with self._signals.discard_on_error():
                self._checkpointer.close()
        finally:
            self._signals.__exit__(kind, error, traceback)

    def close(self) -> None:
        """Lets others write, where the run did not begin."""
        self._checkpointer.close()

    def _require_same_run(self, about: dict[str, Any]) -> None:
        if "epoch_over" not in about:
            raise CheckpointMismatchError(
                f"{self._checkpointer.directory}: expected checkpoints of a run, got those of "
                "Checkpointer.save. Restore the state by hand, and pass start=, or take another "
                "directory."
            )
        self._require_same_data(differences(about["data"], self._batches.fingerprint()))

    def _require_same_data(self, differences: list[str]) -> None:
        if differences:
            raise CheckpointMismatchError(
                f"{self._checkpointer.directory}: the data are not those of the run that was "
                f"saved:\n{_tree.bullets(differences)}\nNothing was loaded. To go on with other "
                "data, restore the state with Checkpointer.restore, and begin a run of its own: "
                "start=, and a checkpointer with another directory."
            )

    def _require_mesh(self, about: dict[str, Any], state: PyTree) -> None:
        """Refuses several processes, each with a state for itself, where they had one together."""
        saved = about["run"]["mesh"]
        if is_multiprocess() and saved and not fingerprint(state)["mesh"]:
            raise CheckpointMismatchError(
                f"{self._checkpointer.directory}: expected a state on a mesh of all processes, as "
                f"the one that was saved on {', '.join(saved)}, got one that each process has for "
                "itself: each would train alone. Make it with functrain.sharding.create, or pass "
                "sharding=."
            )

    def _say_what_differs(self, about: dict[str, Any], state: PyTree) -> None:
        lines = differences(about["run"], fingerprint(state))
        if lines:
            warnings.warn(
                f"{self._checkpointer.directory}: the run goes on elsewhere than it was saved, so "
                f"that last bits may differ from those of one run:\n{_tree.bullets(lines)}",
                stacklevel=2,
            )

    def _look_for_best(self, event: Event) -> None:
        name = self._checkpointer.monitor
        if not self._seen_best and name not in split_members(event.values):
            warnings.warn(
                f"best: expected one of {sorted(event.values)}, got {name!r}. Values of an "
                f"evaluation need {self._evaluation}.",
                stacklevel=2,
            )
        self._seen_best = True


def _require_no_clock(checkpointer: Checkpointer) -> None:
    """Refuses what depends on the time, where several processes are to do the same."""
    if not is_multiprocess():
        return
    if getattr(checkpointer.every, "seconds", None) is not None:
        raise ValueError(
            "checkpointer: expected every=functrain.every(steps=...) or epochs= where there are "
            f"several processes, whose clocks differ, got {checkpointer.every!r}"
        )
    if checkpointer.budget is not None:
        raise ValueError(
            "checkpointer: expected budget=None where there are several processes, whose clocks "
            f"differ, got {checkpointer.budget}"
        )


def _is_finished(about: Mapping[str, Any], epochs: int) -> bool:
    done = about["done"]
    return done is not None and (done["stopped"] or epochs <= done["epochs"])
