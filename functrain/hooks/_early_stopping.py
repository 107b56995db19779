"""Stopping when it no longer gets better."""

import math
from typing import Literal

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.loop._events import EpochEnd, Event, RunEnd


class EarlyStopping:
    """A hook that stops the run when a value no longer improves, and brings back the best state.

    It looks whenever the value is there: each epoch, or each time an `Evaluate` with another
    `when` has put it in.

    Args:
      monitor: Name of the value, such as ``"val_loss"``.
      patience: How many times in a row it may fail to improve before the run stops.
      min_delta: An improvement by less than this is none.
      mode: ``"min"`` or ``"max"``, which is better.
      restore_best: End the run, stopped or not, with the state that had the best value. Keeps a
        copy of it on the device.

    Attributes:
      best: The best value so far. NaN is never best.
      best_step: The step it was seen at, or None.

    Raises:
      ValueError: An argument makes no sense; or (at the end of the first epoch) there is no value
        of that name.

    Examples:
      >>> from functrain import EpochEnd, Position
      >>> hook = EarlyStopping("val_loss", patience=1, restore_best=False)
      >>> for loss in (0.5, 0.4, 0.4, 0.6):
      ...     event = EpochEnd(position=Position(step=1), state=(), values={"val_loss": loss})
      ...     hook(event)
      ...     print(loss, event.stopped)
      0.5 False
      0.4 False
      0.4 False
      0.6 True
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 0,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        restore_best: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode: expected 'min' or 'max', got {mode!r}")
        if patience < 0 or min_delta < 0:
            raise ValueError(
                f"patience and min_delta: expected 0 or more, got {patience} and {min_delta}"
            )
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.restore_best = restore_best
        self._sign = 1.0 if mode == "min" else -1.0
        self.begin()

    def begin(self) -> None:
        """Forgets what an earlier run came to."""
        self.best = self._sign * math.inf
        self.best_step: int | None = None
        self._best_state: PyTree = None
        self._failures = 0

    def __call__(self, event: Event, /) -> None:
        """Looks at the value, if it is there."""
        if isinstance(event, RunEnd):
            if self.restore_best and self.best_step is not None:
                event.state = self._best_state
        elif self.monitor in event.values:
            self._look(event, event.values[self.monitor])
        elif isinstance(event, EpochEnd) and self.best_step is None and self._failures == 0:
            raise ValueError(
                f"monitor: expected one of {sorted(event.values)}, got {self.monitor!r}. "
                "Values of an evaluation need eval_data and eval_step, or an Evaluate hook that "
                "comes before this one."
            )

    def _look(self, event: Event, value: float) -> None:
        if self._sign * value < self._sign * self.best - self.min_delta:
            self.best, self.best_step, self._failures = value, event.step, 0
            if self.restore_best:
                self._best_state = _tree.copy(event.state)
            return
        self._failures += 1
        if self._failures > self.patience:
            event.stop()
