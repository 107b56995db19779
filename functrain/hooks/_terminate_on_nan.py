"""Stopping when a loss is no longer finite."""

import warnings
from typing import Any

import numpy as np

from functrain.common import _repr
from functrain.common._checks import require, require_integer
from functrain.loop._events import Event, LogsReady, RunEnd


class TerminateOnNaN:
    """A hook that stops the run when a loss was not finite several steps in a row.

    Every step is looked at, without waiting: what steps report comes one program late, and so the
    run ends up to two programs after the step that is named. Checkpoints from before it are there:
    `functrain.Checkpointer.rollback`.

    A population goes on while the loss of one member is finite.

    Args:
      after: How many steps in a row.
      monitor: Name of the number among the logs.

    Raises:
      ValueError: `after` is no whole number from 1 on; or (at the first logs) there is no such
        number.

    Attributes:
      step: The last of these steps, or None.

    Examples:
      >>> from functrain import Position
      >>> from functrain.events import LogsReady
      >>> hook = TerminateOnNaN(after=2)
      >>> losses = np.array([1.0, np.nan, 2.0, np.nan, np.inf])
      >>> at_five = Position(step=5)
      >>> hook.logs(LogsReady(position=at_five, steps=5, examples=1, logs={"loss": losses}))
      >>> hook.step
      5
    """

    def __init__(self, *, after: int = 1, monitor: str = "loss") -> None:
        require_integer("after", after)
        self.after, self.monitor, self.resume_key = after, monitor, monitor
        self.step: int | None = None
        self._in_a_row = 0  # steps until now

    def __repr__(self) -> str:
        return _repr.call(self, after=self.after, monitor=self.monitor)

    def begin(self) -> None:
        """Forgets what an earlier run ended with."""
        self.step = None

    def logs(self, event: LogsReady, /) -> None:
        """Looks at the steps of a chunk."""
        has_value, names = self.monitor in event.logs, f"one of {sorted(event.logs)}"
        advice = "Only numbers that every step reports are looked at."
        require(has_value, "monitor", names, self.monitor, advice)
        finite = np.isfinite(event.logs[self.monitor].astype(np.float64))
        finite = np.any(finite.reshape(event.steps, -1), axis=1)  # of a population: any member
        if self.step is not None or finite.all():
            self._in_a_row = 0
            return
        for step, is_finite in enumerate(finite, event.step - event.steps + 1):
            self._in_a_row = 0 if is_finite else self._in_a_row + 1
            if self._in_a_row == self.after:
                self.step = step
                return

    def __call__(self, event: Event, /) -> None:
        """Stops the run, and says why when it ends."""
        if self.step is None:
            return
        event.stop()
        if isinstance(event, RunEnd):
            steps = f"{self.after} steps up to" if self.after > 1 else "step"
            warnings.warn(
                f"TerminateOnNaN: {self.monitor!r} was not finite in {steps} {self.step}. The run "
                f"was ended after step {event.step}: what steps report comes one program late. "
                "functrain.inspect.explain_nan(state, step, batch) names the operation that made "
                "it.",
                stacklevel=2,
            )

    def state(self) -> dict[str, Any]:
        """Returns how many steps in a row there were, to be saved."""
        return {"in_a_row": self._in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on counting from there."""
        self._in_a_row = state["in_a_row"]

    def close(self) -> None:
        """Counts anew."""
        self._in_a_row = 0
