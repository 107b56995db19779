"""Saves a run in checkpoints, and resumes it from the last one."""

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, Self

from functrain.checkpoint import _leaves
from functrain.checkpoint._checkpointer import Checkpointer
from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._manifest import differences, fingerprint
from functrain.checkpoint._processes import is_multiprocess
from functrain.checkpoint._processes import main_group as processes
from functrain.common import _tree
from functrain.common._checks import require, require_instance
from functrain.common._types import PyTree
from functrain.common._values import split_members
from functrain.common._warnings import warn
from functrain.data._batches import Batches
from functrain.data._epochs_of_steps import EpochsOfSteps
from functrain.engine._position import Position
from functrain.engine._signals import DeferredSignals
from functrain.loop import _preemption
from functrain.loop._events import EpochEnd, Event
from functrain.loop._finite import LossWatch
from functrain.loop._require import require_epochs_left


class Part(Protocol):
    """A part of a run that resumes with it, such as a history or hooks."""

    def state(self) -> Any:
        """Returns the state to save: nested numbers, texts and arrays."""

    def restore(self, state: Any) -> None:
        """Restores what `state` returned."""


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from.

    Attributes:
      state: The state to continue with; for a training that is over, its result.
      metrics: In mid-epoch, the metrics of the epoch so far; else None.
      position: The position to continue from.
      epochs: The number of epochs of the training.
      values: The values of the last event.
      epoch_end_is_pending: True if the event at the end of the epoch has not been yielded yet.
      nothing_left: True after the last epoch: at most the end of the run is left.
      finished: True if the run is over.
      stopped: True if a hook has stopped the run.
      directory: The directory of the checkpoints.
    """

    state: PyTree
    metrics: PyTree
    position: Position
    epochs: int
    values: dict[str, Any]
    epoch_end_is_pending: bool
    nothing_left: bool
    finished: bool
    stopped: bool
    directory: str

    def describe(self) -> str:
        """Returns a line about the position at which the run resumes, for the user."""
        steps = f"{self.position.step:,} steps"
        if not self.finished:
            return f"resuming after {steps}, in epoch {self.position.epoch + 1}: {self.directory}"
        if self.stopped:
            return (
                f"already finished, stopped early after {steps}: {self.directory}. To train on "
                "from an earlier step, use Checkpointer.rollback; to start over, use another "
                "directory."
            )
        return (
            f"already finished, after {steps}: {self.directory}. To continue, pass more epochs "
            "or steps; to start over, use another directory."
        )


class _Rest(NamedTuple):
    """The part of a training after a checkpoint; the fields are those of `Resumed`."""

    position: Position
    epochs: int
    finished: bool
    nothing_left: bool


class Saving:
    """Saves a run when its checkpointer is due, at its end, and after SIGTERM.

    Args:
      checkpointer: Writes the checkpoints, and knows when one is due.
      batches: The data.
      parts: Further parts of the run that are saved and resumed, by name.
      evaluation: The arguments that make the loop evaluate, for the warning that the monitored
        value is missing.
      losses: The losses of the run. The last checkpoint before they became NaN is kept.

    Attributes:
      trigger: The trigger at whose steps chunks must end.

    Raises:
      TypeError: `checkpointer` is not a Checkpointer.
      ValueError: It depends on the time, and there are several processes, whose clocks differ.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        batches: Batches,
        parts: Mapping[str, Part],
        evaluation: str = "eval_data and eval_step, or an Evaluate hook",
        losses: LossWatch | None = None,
    ) -> None:
        advice = "Make one with functrain.Checkpointer('run')."
        expected = "a functrain.Checkpointer"
        require_instance("checkpointer", checkpointer, Checkpointer, expected, advice)
        self._checkpointer, self._batches, self._parts = checkpointer, batches, parts
        self._evaluation, self._losses = evaluation, losses
        _require_no_clock(checkpointer)
        self.trigger = checkpointer.every
        # JAX's preemption service has its own handler of SIGTERM.
        self._uses_preemption_service = _preemption.is_enabled()
        terminate: Literal["none", "any"] = "none" if self._uses_preemption_service else "any"
        self._signals = DeferredSignals(interrupt=False, terminate=terminate)
        self._is_to_end = False
        # An interval in seconds begins with the run.
        self._last_save_time = time.perf_counter()
        # True once the monitored value has been seen, or a warning has been given that it is
        # missing.
        self._has_checked_monitor = checkpointer.monitor is None
        self._data_state: Callable[..., Any] = batches.state

    def resume(
        self,
        state: PyTree,
        metrics: PyTree,
        epochs: int,
        release: Callable[[], None] | None = None,
    ) -> Resumed | None:
        """Reads the last checkpoint, and restores the data and the parts; None if there is none.

        Args:
          state: A tree with the structure, dtypes and shardings of the run's state.
          metrics: A tree with those of its metrics, or None.
          epochs: The number of epochs of the run.
          release: Called before arrays are read into memory.
        """
        checkpointer, refusal = self._checkpointer, None
        try:
            checkpointer._prepare()
        except OSError as error:
            # The result of a finished run can be read where nothing can be written.
            if is_multiprocess():
                raise
            refusal = error
        if not checkpointer.steps():
            if refusal is not None:
                raise refusal
            return None

        def trees_to_read(manifest: dict[str, Any]) -> dict[str, PyTree]:
            if refusal is not None and not manifest.get("done"):
                raise refusal
            self._require_same_run(manifest)
            rest = self._rest(manifest, epochs)
            if refusal is not None and not rest.finished:
                raise refusal
            # Hooks may have chosen another final state, such as the best one. With more epochs, the
            # run continues from the last state instead.
            is_final = rest.finished and "final" in manifest["trees"]
            trees = {"final" if is_final else "state": state}
            has_metrics = metrics is not None and "metrics" in manifest["trees"]
            if has_metrics and not _leaves.differences(manifest, {"metrics": metrics}):
                trees["metrics"] = metrics
            if release is not None:
                target = checkpointer._directory.target(manifest["step"])
                _leaves.require_leaves(target, manifest, trees)
                release()
            return trees

        # `trees_to_read` raises before any array is read, or released.
        restored, trees, manifest = checkpointer._read(trees_to_read)
        self._require_mesh(manifest, state)
        rest = self._rest(manifest, epochs)
        position, data = rest.position, restored.documents["data"]
        if rest.nothing_left:
            # The data do not begin in this run, so a save keeps their saved position.
            self._data_state = lambda **_: data
        else:
            # If one process finds other data, all must raise: the rest would wait for it forever.
            with processes.raise_in_all():
                self._require_same_data(self._batches.restore(data, position.epoch, position.batch))
        # Later checkpoints that could not be read are damaged, and the run writes them again.
        step = restored.position.step
        processes.call_on_first(lambda: checkpointer._directory.set_aside_later(step))
        self._warn_of_differences(manifest, state)
        if metrics is not None and not (manifest["epoch_over"] or "metrics" in trees):
            warn(
                "metrics: the checkpoint is from within an epoch, and of a step with other metrics "
                f"or none. Those of epoch {position.epoch} are of its remaining batches only."
            )
        for name, part in self._parts.items():
            # A part that is new in this run, such as another hook, keeps its initial state.
            if name in restored.documents:
                part.restore(restored.documents[name])
        return Resumed(
            trees.get("final", restored.state),
            trees.get("metrics"),
            position,
            rest.epochs,
            restored.values,
            epoch_end_is_pending=not manifest["epoch_over"],
            nothing_left=rest.nothing_left,
            finished=rest.finished,
            stopped=rest.finished and manifest["done"]["stopped"],
            directory=checkpointer.directory,
        )

    def _rest(self, manifest: dict[str, Any], epochs: int) -> "_Rest":
        """Returns the part of the training after a checkpoint.

        Raises:
          ValueError: The training was to end before it.
        """
        position, epoch_is_over = Position(**manifest["position"]), manifest["epoch_over"]
        if isinstance(self._batches, EpochsOfSteps):
            resized = self._batches.continue_at(*position, epoch_is_over=epoch_is_over)
            epochs = epochs if resized is None else resized
        done = manifest["done"]
        finished = done is not None and (done["stopped"] or epochs <= done["epochs"])
        nothing_left = finished or (epoch_is_over and position.epoch + 1 == epochs)
        if epoch_is_over and not nothing_left:
            position = Position(position.step, position.epoch + 1)
        place = f"step {position.step}, from which {self._checkpointer.directory} resumes"
        require_epochs_left(self._batches, position, epochs, place, is_finished=finished)
        return _Rest(position, epochs, finished, nothing_left)

    def is_due(self, event: Event) -> bool:
        """Returns True if the run should be saved after an event."""
        epochs = event.epoch + 1 if isinstance(event, EpochEnd) else None
        is_due = self.trigger.due(event.step, epochs, time.perf_counter() - self._last_save_time)
        if epochs is not None:
            self._check_monitor(event)
            # The best epoch is saved whatever the budget.
            if self._checkpointer._is_improved(event.values):
                return True
        return is_due and self._checkpointer._is_within_budget()

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
          trees: The state, and in mid-epoch the metrics.
          epoch_is_over: True if the event at the end of the epoch has been yielded.
          done: For a run that is over, its number of epochs, and whether it was stopped.
        """
        self._last_save_time = time.perf_counter()
        has_value = self._checkpointer.monitor in split_members(event.values)
        self._has_checked_monitor = self._has_checked_monitor or has_value
        # If the run has one epoch, its end was not seen by `is_due`.
        if done is not None and epoch_is_over:
            self._check_monitor(event)
        documents = {name: part.state() for name, part in self._parts.items()}
        documents["data"] = self._data_state(epoch_is_over=epoch_is_over)
        # If the save fails, the error should be seen, and not a signal that would end the process.
        with self._signals.discard_on_error(), self._checkpointer._save_lock:
            self._checkpointer._write(
                trees,
                event.position,
                event.values,
                documents,
                # After the end, no program consumes the state while it is written.
                copy=done is None,
                kept_before=self._last_finite_step(event.step),
                epoch_over=epoch_is_over,
                done=done,
                data=self._batches.fingerprint(),
            )

    def _last_finite_step(self, step: int) -> int | None:
        """Returns the last step whose loss was finite; None if that of this step was."""
        last = None if self._losses is None else self._losses.last_finite
        return None if last is None or last >= step else last

    def is_asked_to_end(self) -> bool:
        """Returns True if the run must end now after SIGTERM; call it once after each event."""
        if not self._is_to_end:
            if self._uses_preemption_service:
                self._is_to_end = _preemption.is_time_to_end()
            else:
                # SIGTERM may reach only some of the processes, so they ask each other.
                self._is_to_end = any(processes.gather(lambda: bool(self._signals.is_pending)))
        return self._is_to_end

    def end(self) -> None:
        """Ends the process with status 143, or passes the signal to its previous handler."""
        # That handler may let the run continue.
        self._is_to_end = False
        with self._signals.discard_on_error():
            self._checkpointer.wait()
        # The signal may have reached another process only, so there may be no handler to call.
        if is_multiprocess():
            raise SystemExit(128 + signal.SIGTERM)
        self._signals.handle_pending()

    def __enter__(self) -> Self:
        """Begins to defer SIGTERM."""
        self._signals.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Waits until checkpoints are written; releases the directory and the signals."""
        try:
            with self._signals.discard_on_error():
                self._checkpointer.close()
        finally:
            self._signals.__exit__(kind, error, traceback)

    def close(self) -> None:
        """Releases the directory, for a run that has not begun."""
        self._checkpointer.close()

    def _require_same_run(self, manifest: dict[str, Any]) -> None:
        if "epoch_over" not in manifest:
            raise CheckpointMismatchError(
                f"{self._checkpointer.directory}: expected checkpoints of a run, got those of "
                "Checkpointer.save. Restore the state with Checkpointer.restore and pass start=, "
                "or use another directory. If earlier ones are of a run, rollback(step) returns to "
                "them."
            )
        saved, current = manifest["data"], self._batches.fingerprint()
        unit = "steps_per_epoch"
        if saved.get(unit, 0) != current.get(unit, 0):
            raise CheckpointMismatchError(
                f"{unit}: expected {_length_of_epochs(saved)}, as in the run that was saved in "
                f"{self._checkpointer.directory}, got {_length_of_epochs(current)}. A run keeps "
                "the length of its epochs; epochs= and steps= may grow. Nothing was loaded."
            )
        self._require_same_data(differences(saved, current))

    def _require_same_data(self, differences: list[str]) -> None:
        if differences:
            raise CheckpointMismatchError(
                f"{self._checkpointer.directory}: the data are not those of the run that was "
                f"saved:\n{_tree.bullets(differences)}\nNothing was loaded. To continue with other "
                "data, restore the state with Checkpointer.restore, and begin a new run with "
                "start= and a checkpointer with another directory."
            )

    def _require_mesh(self, manifest: dict[str, Any], state: PyTree) -> None:
        """Raises an error if each process has its own state, but the saved one was on one mesh."""
        # A single process may resume without a mesh: it is the whole run.
        saved = manifest["run"]["mesh"]
        if is_multiprocess() and saved and not fingerprint(state)["mesh"]:
            raise CheckpointMismatchError(
                f"{self._checkpointer.directory}: expected a state on a mesh of all processes, "
                f"like the one that was saved on {', '.join(saved)}, got a separate state in each "
                "process: each would train alone. Make it with functrain.sharding.create, or pass "
                "sharding=."
            )

    def _warn_of_differences(self, manifest: dict[str, Any], state: PyTree) -> None:
        lines = differences(manifest["run"], fingerprint(state))
        if lines:
            warn(
                f"{self._checkpointer.directory}: the run resumes in another environment than it "
                "was saved in, so results may differ from those of an uninterrupted run:\n"
                f"{_tree.bullets(lines)}",
            )

    def _check_monitor(self, event: Event) -> None:
        """Warns at the first end of an epoch if the monitored value is missing."""
        name = self._checkpointer.monitor
        if not self._has_checked_monitor and name not in split_members(event.values):
            warn(
                f"monitor: expected one of {sorted(event.values)}, got {name!r}. Values of an "
                f"evaluation need {self._evaluation}.",
            )
        self._has_checked_monitor = True


def _length_of_epochs(data: Mapping[str, Any]) -> str:
    """Returns the length of epochs in a fingerprint of data, for an error."""
    if "steps_per_epoch" not in data:
        return "epochs of one pass over the data"
    steps = data["steps_per_epoch"]
    return "one epoch, with steps= alone" if steps is None else f"steps_per_epoch={steps}"


def _require_no_clock(checkpointer: Checkpointer) -> None:
    """Raises ValueError if saves depend on the time, and there are several processes."""
    # All processes must save at the same step.
    if not is_multiprocess():
        return
    require(
        getattr(checkpointer.every, "seconds", None) is None,
        "checkpointer",
        "every=functrain.every(steps=...) or epochs= with several processes, whose clocks differ",
        checkpointer.every,
    )
    require(
        checkpointer.budget is None,
        "checkpointer",
        "budget=None with several processes, whose clocks differ",
        checkpointer.budget,
    )
