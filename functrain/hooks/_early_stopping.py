"""Stopping when it no longer gets better."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import jax

from functrain.common import _direction, _repr, _tree
from functrain.engine._trigger import Trigger
from functrain.hooks._hook import triggers
from functrain.loop._events import EpochEnd, Event, RunEnd


class EarlyStopping:
    """A hook that stops the run when a value no longer improves, and brings back the best state.

    It looks whenever the value is there: each epoch, or each time an `Evaluate` with another
    `when` has put it in.

    Args:
      monitor: Name of the value, such as ``"val_loss"``.
      patience: How many times in a row it may fail to improve before the run stops.
      min_delta: An improvement by less than this is none.
      mode: ``"min"`` or ``"max"``, which is better; ``"auto"`` takes it from the name: `loss`,
        `error`, `mse` and the like are better small, `accuracy`, `auc`, `f1` and the like large.
      restore_best: End the run, stopped or not, with the state that had the best value. Keeps a
        copy of it on the device.

    Attributes:
      best: The best value so far. NaN is never best.
      best_step: The step it was seen at, or None.

    Raises:
      ValueError: An argument makes no sense, or the name does not tell what is better; or (at the
        end of the first epoch after which no hook before it is still to be due for the first
        time) there is no value of that name.

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

    of_members = False  # of a population

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 0,
        min_delta: float = 0.0,
        mode: _direction.Mode = "auto",
        restore_best: bool = True,
    ) -> None:
        if patience < 0 or min_delta < 0:
            raise ValueError(
                f"patience and min_delta: expected 0 or more, got {patience} and {min_delta}"
            )
        self._sign = _direction.sign(monitor, mode)
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.restore_best = restore_best
        self._to_come: list[Trigger] = []
        self._restored = False
        self.begin()

    def __repr__(self) -> str:
        mode = "min" if self._sign > 0 else "max"
        return _repr.call(self, monitor=self.monitor, patience=self.patience, mode=mode)

    def begin(self) -> None:
        """Forgets what an earlier run came to, unless that has just been restored."""
        if self._restored:
            self._restored = False
            return
        self.best = self._sign * math.inf
        self.best_step: int | None = None
        self._best_leaves: list[Any] = []
        self._failures = 0

    def comes_after(self, before: Iterable[Any]) -> None:
        """Learns which hooks come before it: the value may be there once each has been due."""
        self._to_come = triggers(before)

    def state(self) -> dict[str, Any]:
        """Returns what it has come to, to be saved; of the best state the leaves."""
        return {
            "best": float(self.best),
            "best_step": self.best_step,
            "failures": self._failures,
            "best_state": self._best_leaves,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Puts back what `state` returned; the run that begins next goes on from there."""
        self.best, self.best_step = state["best"], state["best_step"]
        self._failures, self._best_leaves = state["failures"], state["best_state"]
        self._restored = True

    def __call__(self, event: Event, /) -> None:
        """Looks at the value, if it is there."""
        if isinstance(event, RunEnd):
            self._end(event)
        elif self.monitor in event.values:
            self._look(event, event.values[self.monitor])
        elif not self._seen:
            self._miss(event)

    @property
    def _seen(self) -> bool:
        return self.best_step is not None or self._failures > 0

    def _look(self, event: Event, value: float) -> None:
        if self._sign * value < self._sign * self.best - self.min_delta:
            self.best, self.best_step, self._failures = value, event.step, 0
            if self.restore_best:
                self._best_leaves = jax.tree.leaves(_tree.copy(event.state))
            return
        self._failures += 1
        if self._failures > self.patience:
            event.stop()

    def _miss(self, event: Event) -> None:
        """Refuses a value that no hook has added, once none is left that might."""
        epochs = event.epoch + 1 if isinstance(event, EpochEnd) else None
        # Seconds are never up here: such a hook may always be due later.
        self._to_come = [when for when in self._to_come if not when.due(event.step, epochs, 0.0)]
        if isinstance(event, EpochEnd) and not self._to_come:
            raise ValueError(
                f"monitor: expected one of {sorted(event.values)}, got {self.monitor!r}. "
                "Values of an evaluation need eval_data and eval_step, or an Evaluate hook that "
                "comes before this one. A function that adds it later says when: @every(epochs=2)."
            )

    def _warn_of_what_never_came(self) -> None:
        if self._to_come and not self._seen:
            warnings.warn(
                f"EarlyStopping: expected {self.monitor!r} during the run, and it never came. Of "
                f"the hooks before it these were never due: {self._to_come}.",
                stacklevel=2,
            )

    def _end(self, event: RunEnd) -> None:
        self._warn_of_what_never_came()
        if self.restore_best and self.best_step is not None:
            now, structure = jax.tree.flatten(event.state)
            placed = [_like(x, y) for x, y in zip(self._best_leaves, now, strict=True)]
            event.state = jax.tree.unflatten(structure, placed)


def _like(leaf: Any, other: jax.Array) -> Any:
    """Puts a leaf that comes from a checkpoint where another is."""
    return leaf if isinstance(leaf, jax.Array) else _tree.placed_like(leaf, other)
