"""Reports of a run to Ray Train, which name its checkpoints."""

import dataclasses
import tempfile
from typing import Any, ClassVar

import jax

from functrain.checkpoint._checkpointer import Checkpointer
from functrain.checkpoint._directory import path_of
from functrain.common._checks import require, require_instance
from functrain.common._library import import_optional
from functrain.common._log_values import is_loggable, split_members
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.loop._events import ChunkEnd, Event, RunEnd


@dataclasses.dataclass(eq=False)
class RayReport:
    """A hook that reports values and checkpoints to Ray Train, in all workers of a JaxTrainer.

    It reports the values of each epoch, with its ``step`` and ``epoch``, when its checkpoint is
    complete: at the end of the next epoch or of the run. Ray's checkpoint only names that of the
    `functrain.Checkpointer`: ``result.checkpoint.get_metadata()["path"]`` is its path, for
    `functrain.load`. The checkpointer deletes old ones; ``keep=None`` keeps all that Ray names.

    When Ray starts the workers again, the run resumes from its checkpointer, and each epoch is
    reported once. Reports of steps without a checkpoint reach the callbacks of Ray, and not its
    `Result`.

    A report waits for all workers, and for a save in progress. Ray takes one in two seconds; the
    environment variable ``RAY_TRAIN_HEALTH_CHECK_INTERVAL_S`` changes that.

    Args:
      checkpointer: That of the run; None reports values only.
      every: A number of steps, or a trigger by steps or epochs. The end of each epoch by default.

    Raises:
      TypeError: `checkpointer` is something else.
      ValueError: `every` is something else.
      ImportError: Ray is not installed.
      RuntimeError: From Ray when the run begins, if it is not in a function of a trainer.

    Examples:
      >>> hooks = [RayReport(checkpointer)]  # doctest: +SKIP
    """

    checkpointer: Checkpointer | None = None
    _: dataclasses.KW_ONLY
    every: int | Trigger | None = None

    # The end of the run reports what is left.
    acts_at_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.checkpointer is not None:
            advice = "Pass that of the run."
            expected = "a functrain.Checkpointer"
            require_instance("checkpointer", self.checkpointer, Checkpointer, expected, advice)
        self.every = as_trigger(self.every, Every(epochs=1))
        has_clock = getattr(self.every, "seconds", None) is not None
        expected = "functrain.every(steps=...) or epochs=, since the clocks of workers differ"
        require(not has_clock, "every", expected, self.every)
        hint = "Ray Train needs its library: pip install 'functrain[ray]'"
        self._train = import_optional("ray.train", hint)
        # Reports to make. The last one waits for its checkpoint, which is saved after the hooks.
        self._pending: list[dict[str, float]] = []
        # The last two that were made: Ray loses them if a worker dies before all have reported.
        self._recent: list[dict[str, float]] = []
        self._is_over = False

    def begin(self) -> None:
        """Forgets those reports of a resumed run that Ray has."""
        last = self._train.get_checkpoint()
        last_step = -1 if last is None else last.get_metadata().get("step", -1)
        self._pending = [values for values in self._pending if values["step"] > last_step]

    def __call__(self, event: Event, /) -> None:
        """Makes the report of the event before, and keeps the values for the next one."""
        if self._pending and self._pending[-1]["step"] != event.step:
            self._report()
        values = {n: x for n, x in event.values.items() if is_loggable(x, event._of_members)}
        if isinstance(event, ChunkEnd):
            values = {**event.latest(), **values}
        earlier = self._pending.pop() if self._pending else {}
        position = {"step": event.step, "epoch": event.epoch}
        self._pending.append({**earlier, **position, **split_members(values)})
        self._is_over = isinstance(event, RunEnd)

    def close(self) -> None:
        """Makes the last report, unless the run failed."""
        if self._is_over:
            self._report()
        self._pending, self._recent, self._is_over = [], [], False

    def state(self) -> dict[str, Any]:
        """Returns the reports that Ray may not have, for the checkpoint."""
        return {"reports": self._recent + self._pending}

    def restore(self, state: dict[str, Any], /) -> None:
        """Makes reports that the ended run may not have made."""
        self._pending = state["reports"]

    def _report(self) -> None:
        for values in self._pending:
            # Ray copies the folder, which contains the name and nothing else.
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = self._named_checkpoint(int(values["step"]), folder)
                self._train.report(values, checkpoint=checkpoint)
        self._recent = [*self._recent, *self._pending][-2:]
        self._pending = []

    def _named_checkpoint(self, step: int, folder: str) -> Any:
        """Returns what names the checkpoint of a step, in the first worker; None without one."""
        if self.checkpointer is None or jax.process_index() != 0:
            return None
        self.checkpointer.wait()
        if step not in self.checkpointer.steps():
            return None
        checkpoint = self._train.Checkpoint.from_directory(folder)
        path = path_of(self.checkpointer.directory, step)
        checkpoint.set_metadata({"path": path, "step": step})
        return checkpoint
