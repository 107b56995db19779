"""Resumes a run from its last checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from functrain.checkpoint import _leaves
from functrain.checkpoint._checkpointer import Checkpointer
from functrain.checkpoint._directory import for_later, set_aside, visible_steps
from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._manifest import differences, fingerprint
from functrain.checkpoint._processes import is_multiprocess
from functrain.checkpoint._processes import main_group as processes
from functrain.common import _tree
from functrain.common._checks import require_no_problems
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.data._batches import Batches
from functrain.data._epochs_of_steps import EpochsOfSteps
from functrain.engine._position import Position
from functrain.loop._arguments import require_epochs_left


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
      position: The position to continue from.
      epochs: The number of epochs of the training.
      nothing_left: True after the last epoch: at most the end of the run is left.
      finished: True if the run is over.
      stopped: True if a hook has stopped the run.
      directory: The directory of the checkpoints.
      state: The state to continue with; for a training that is over, its result.
      metrics: In mid-epoch, the metrics of the epoch so far; else None.
      values: The values of the last event.
      data: The saved position of the data.
    """

    position: Position
    epochs: int
    nothing_left: bool
    finished: bool
    stopped: bool
    directory: str
    state: PyTree = None
    metrics: PyTree = None
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: Any = None

    def describe(self, *, has_epochs: bool = True) -> str:
        """Returns a line about the position at which the run resumes, for the user.

        Args:
          has_epochs: False if the training is not divided into epochs.
        """
        steps = f"{self.position.step:,} steps"
        if not self.finished:
            epoch = f", in epoch {self.position.epoch + 1}" if has_epochs else ""
            return f"resuming after {steps}{epoch}: {self.directory}"
        end, advice = f"after {steps}", "To continue, pass more epochs or steps"
        if self.stopped:
            end = f"stopped early after {steps}"
            advice = "To train on from an earlier step, use Checkpointer.rollback"
        return f"already finished, {end}: {self.directory}. {advice}; or use another directory."


def resume(
    checkpointer: Checkpointer,
    batches: Batches,
    parts: Mapping[str, Part],
    state: PyTree,
    metrics: PyTree,
    epochs: int,
    release: Callable[[], None] | None = None,
) -> Resumed | None:
    """Reads the last checkpoint, and restores the data and the parts; None if there is none.

    Args:
      checkpointer: The checkpointer of the run.
      batches: The data.
      parts: Further parts of the run, by name.
      state: A tree with the structure, dtypes and shardings of the run's state.
      metrics: A tree with those of its metrics, or None.
      epochs: The number of epochs of the run.
      release: Called before arrays are read into memory.
    """
    directory, refusal = checkpointer.directory, _why_not_writable(checkpointer)
    if not visible_steps(directory):
        if refusal is not None:
            raise refusal
        return None

    remaining: Resumed | None = None

    def trees_to_read(manifest: dict[str, Any]) -> dict[str, PyTree]:
        nonlocal remaining
        _require_same_run(directory, batches, manifest)
        remaining = _remaining(directory, batches, manifest, epochs)
        if refusal is not None and not remaining.finished:
            raise refusal
        trees = _saved_trees(manifest, state, metrics, is_finished=remaining.finished)
        if release is not None:
            _leaves.require_leaves(directory, manifest, trees)
            release()
        return trees

    # `trees_to_read` raises before any array is read, or released.
    restored, trees, manifest = checkpointer._read(trees_to_read)
    assert remaining is not None, "a checkpoint was read"
    remaining = dataclasses.replace(
        remaining,
        state=trees.get("final", restored.state),
        metrics=trees.get("metrics"),
        values=restored.values,
        data=restored.documents["data"],
    )
    # If nothing is left, the data do not begin in this run.
    if not remaining.nothing_left:
        _restore_data(directory, batches, remaining)
    # Later checkpoints that could not be read are damaged, and the run writes them again.
    step = restored.position.step
    processes.call_on_first(lambda: for_later(set_aside, directory, step))
    _compare_environments(directory, manifest, state)
    if metrics is not None and not (manifest["epoch_over"] or "metrics" in trees):
        warn(
            "metrics: the checkpoint is from within an epoch, and of a step with other metrics "
            f"or none. Those of epoch {remaining.position.epoch} are of its remaining batches only."
        )
    # A part that is new in this run, such as another hook, keeps its initial state.
    for name in parts.keys() & restored.documents.keys():
        parts[name].restore(restored.documents[name])
    return remaining


def _why_not_writable(checkpointer: Checkpointer) -> OSError | None:
    """Returns the error of a directory that cannot be written; None if it can."""
    try:
        processes.call_on_first(checkpointer._require_writable)
    except OSError as error:
        # The result of a finished run can be read where nothing can be written.
        if is_multiprocess():
            raise
        return error
    return None


def _saved_trees(
    manifest: dict[str, Any], state: PyTree, metrics: PyTree, is_finished: bool
) -> dict[str, PyTree]:
    """Returns the trees to read of a checkpoint, by their names there."""
    # Hooks may have chosen another final state, such as the best one. With more epochs, the run
    # continues from the last state instead.
    is_final = is_finished and "final" in manifest["trees"]
    trees = {"final" if is_final else "state": state}
    has_metrics = metrics is not None and "metrics" in manifest["trees"]
    if has_metrics and not _leaves.differences(manifest, {"metrics": metrics}):
        trees["metrics"] = metrics
    return trees


def _restore_data(directory: str, batches: Batches, remaining: Resumed) -> None:
    """Makes the data continue at the position of a checkpoint; raises an error for other data."""
    # If one process finds other data, all must raise: the others would wait for it forever.
    with processes.raise_in_all():
        _, epoch, batch = remaining.position
        changed = batches.restore(remaining.data, epoch, batch)
        _require_same_data(directory, changed)


def _remaining(directory: str, batches: Batches, manifest: dict[str, Any], epochs: int) -> Resumed:
    """Returns what is left of a training after a checkpoint, without what it saved.

    Raises:
      ValueError: The training was to end before it.
    """
    position, epoch_is_over = Position(**manifest["position"]), manifest["epoch_over"]
    if isinstance(batches, EpochsOfSteps):
        resized = batches.continue_at(*position, epoch_is_over=epoch_is_over)
        epochs = epochs if resized is None else resized
    done = manifest["done"]
    finished = done is not None and (done["stopped"] or epochs <= done["epochs"])
    nothing_left = finished or (epoch_is_over and position.epoch + 1 == epochs)
    if epoch_is_over and not nothing_left:
        position = Position(position.step, position.epoch + 1)
    place = f"step {position.step}, from which {directory} resumes"
    require_epochs_left(batches, position, epochs, place)
    return Resumed(
        position,
        epochs,
        nothing_left=nothing_left,
        finished=finished,
        stopped=finished and done["stopped"],
        directory=directory,
    )


def _require_same_run(directory: str, batches: Batches, manifest: dict[str, Any]) -> None:
    if "epoch_over" not in manifest:
        raise CheckpointMismatchError(
            f"{directory}: expected checkpoints of a run, not of Checkpointer.save. "
            "Restore the state with Checkpointer.restore and pass start=, use another directory, "
            "or go back to a checkpoint of a run with rollback(step)."
        )
    _require_same_data(directory, differences(manifest["data"], batches.fingerprint()))


def _require_same_data(directory: str, changed: list[str]) -> None:
    require_no_problems(
        directory,
        changed,
        "the data of the run that was saved",
        "Nothing was loaded. To continue with other data, restore the state with "
        "Checkpointer.restore, and begin a new run with start= and another directory.",
        error=CheckpointMismatchError,
    )


def _compare_environments(directory: str, manifest: dict[str, Any], state: PyTree) -> None:
    """Warns of another environment; raises if each process has its own state, but had a mesh."""
    saved, current = manifest["run"], fingerprint(state)
    # A single process may resume without a mesh: it is the whole run.
    if is_multiprocess() and saved["mesh"] and not current["mesh"]:
        raise CheckpointMismatchError(
            f"{directory}: expected a state on a mesh of all processes, such as "
            f"{saved['mesh']}, got none. Each process would train alone: make the state with "
            "functrain.sharding.create, or pass sharding=."
        )
    if lines := differences(saved, current):
        warn(
            f"{directory}: the run resumes in another environment than it was saved "
            "in, so results may differ from those of an uninterrupted run:\n"
            f"{_tree.bullets(lines)}"
        )
