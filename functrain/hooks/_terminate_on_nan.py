"""Stops a run when its loss is no longer finite."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from functrain.common._checks import require, require_instance, require_integer
from functrain.common._warnings import warn
from functrain.loop._events import ChunkEnd, Event, RunEnd


@dataclasses.dataclass(eq=False)
class TerminateOnNaN:
    """A hook that stops the run when the loss was not finite in several steps in a row.

    Every step is checked, without waiting for the device: logs arrive one program late, so the run
    ends up to two programs after the step that is named. A `functrain.Checkpointer` keeps the last
    checkpoint from before, to which its `rollback` returns.

    A population continues as long as the loss of one member is finite.

    Args:
      after: The number of steps in a row.
      monitor: The name of the value in the logs.

    Raises:
      ValueError: `after` is not a positive integer; or (at the first logs) the logs have no such
        value.

    Attributes:
      step: The last of these steps, or None.

    Examples:
      >>> from functrain import Position
      >>> from functrain.events import ChunkEnd
      >>> hook = TerminateOnNaN(after=2)
      >>> rows = {"loss": np.array([1.0, np.nan, 2.0, np.nan, np.inf])}
      >>> at_five = Position(step=5)
      >>> hook.logs(ChunkEnd(position=at_five, state=(), steps=5, examples=1, rows=rows))
      >>> hook.step
      5
    """

    _: dataclasses.KW_ONLY
    after: int = 1
    monitor: str = "loss"

    # Warns, also if the hook is called on a schedule.
    acts_at_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_integer("after", self.after)
        require_instance("monitor", self.monitor, str, "the name of a value, such as 'loss'")
        self.resume_key = self.monitor
        self.step: int | None = None
        # The length of the current series of steps that were not finite.
        self._in_a_row = 0
        self._is_restored = False

    def begin(self) -> None:
        """Forgets the steps of an earlier run, unless a checkpoint has restored them."""
        if not self._is_restored:
            self._in_a_row, self.step = 0, None
        self._is_restored = False

    def logs(self, event: ChunkEnd, /) -> None:
        """Checks the steps of a chunk."""
        logs = event.host_logs()
        names = f"one of {sorted(logs)}, the values that every step logs"
        require(self.monitor in logs, "monitor", names, self.monitor)
        finite = np.isfinite(logs[self.monitor].astype(np.float64))
        # In a population, one finite member is enough.
        finite = np.any(finite.reshape(event.steps, -1), axis=1)
        for step, is_finite in enumerate(finite, event.step - event.steps + 1):
            self._in_a_row = 0 if is_finite else self._in_a_row + 1
            if self._in_a_row == self.after and self.step is None:
                self.step = step

    def __call__(self, event: Event, /) -> None:
        """Stops the run, and warns when it ends."""
        if self.step is None:
            return
        event.stop()
        if isinstance(event, RunEnd):
            steps = f"{self.after} steps up to" if self.after > 1 else "step"
            warn(
                f"TerminateOnNaN: {self.monitor!r} was not finite in {steps} {self.step}; the run "
                f"ended after step {event.step}. Checkpointer.rollback(step) returns to the last "
                "checkpoint from before, and functrain.inspect.explain_nan(state, step, batch) "
                "names the operation that made it."
            )

    def state(self) -> dict[str, Any]:
        """Returns the number of steps in a row and the last of them, for the checkpoint."""
        return {"in_a_row": self._in_a_row, "step": self.step}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned, for the run that begins next."""
        self._in_a_row, self.step = state["in_a_row"], state["step"]
        self._is_restored = True
