"""Stops a run when a monitored value no longer improves."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from functrain.common import _direction, _repr, _tree
from functrain.engine._trigger import Trigger
from functrain.hooks._hook import triggers
from functrain.loop._events import EpochEnd, Event, RunEnd


class EarlyStopping:
    """A hook that stops the run when a value no longer improves; it can restore the best state.

    The value is compared each time it is reported: each epoch, or whenever an `Evaluate` with
    another `when` has added it. `patience`, `min_delta` and `mode` mean what they mean in
    ``keras.callbacks.EarlyStopping``, and the run stops after the same value.

    Args:
      monitor: Name of the value, such as ``"val_loss"``.
      patience: After how many values in a row without an improvement the run stops. As in Keras,
        0 stops at the first one, and so does 1.
      min_delta: The value must be better than the best one by more than this to count as an
        improvement.
      mode: ``"min"`` or ``"max"``, which is better; ``"auto"`` takes it from the name: `loss`,
        `error`, `mse` and the like are better small, `accuracy`, `auc`, `f1` and the like large.
      restore_best: At the end of the run, stopped early or not, restore the state that had the
        best value, as Keras's `restore_best_weights` does. This costs a second copy of the state
        on the device and in every checkpoint; the checkpoint of the run's end has a third.

    Attributes:
      best: The best value so far. NaN is never best: after a first value of NaN, any number is an
        improvement. Keras (3.15) would keep that NaN as its best and stop.
      best_step: The step it was seen at, or None.
      resume_key: Tells it from other hooks of its class when a run resumes; see
        `functrain.hooks.Hook`. It is the name of the value.

    Raises:
      ValueError: An argument makes no sense, or the name does not tell what is better; or (at the
        end of the first epoch after which no hook before it is still to be due for the first
        time) there is no value of that name.

    Examples:
      >>> from functrain import EpochEnd, Position
      >>> hook = EarlyStopping("val_loss", patience=2)
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
        restore_best: bool = False,
    ) -> None:
        if patience < 0 or min_delta < 0:
            raise ValueError(
                f"patience and min_delta: expected 0 or more, got {patience} and {min_delta}"
            )
        self._sign = _direction.sign(monitor, mode)
        self.monitor = self.resume_key = monitor
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
        """Resets the hook, unless its state has just been restored."""
        if self._restored:
            self._restored = False
            return
        self.best = self._sign * math.inf
        self.best_step: int | None = None
        self._best_leaves: list[Any] = []
        self._failures: int | None = None  # values since the best one; None before the first

    def comes_after(self, before: Iterable[Any]) -> None:
        """Learns which hooks come before it: the value may be there once each has been due."""
        self._to_come = triggers(before)

    def state(self) -> dict[str, Any]:
        """Returns the best value and its step, the failures since, and the best state's leaves."""
        return {
            "best": float(self.best),
            "best_step": self.best_step,
            "failures": self._failures,
            "best_state": self._best_leaves,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned, for the run that begins next."""
        self.best, self.best_step = state["best"], state["best_step"]
        self._failures = state["failures"]
        # Leaves that are not updated from here on would be those of an earlier best value.
        self._best_leaves = state["best_state"] if self.restore_best else []
        self._restored = True
        if self.restore_best and not self._best_leaves and self._has_best:
            warnings.warn(
                "restore_best: the checkpoint has no best state, since it was saved with "
                "restore_best=False. The best one is looked for from here on.",
                stacklevel=2,
            )
            self._forget_best()

    def __call__(self, event: Event, /) -> None:
        """Compares the value with the best one, if the event has it."""
        if isinstance(event, RunEnd):
            self._end(event)
        elif self.monitor in event.values:
            self._compare(event, event.values[self.monitor])
        elif not self._has_seen_values:
            self._miss(event)

    @property
    def _has_seen_values(self) -> bool:
        return self._failures is not None

    @property
    def _has_best(self) -> bool:
        return self.best_step is not None

    def _forget_best(self) -> None:
        self.best, self.best_step = self._sign * math.inf, None

    def _is_better(self, values: Any) -> Any:
        # Keras adds min_delta to the new value, too, and compares in float32 (on JAX, keras.ops
        # does): the same rounding, so the same decision.
        new, best = self._sign * values + self.min_delta, self._sign * self.best
        return np.asarray(new, np.float32) < np.asarray(best, np.float32)

    def _compare(self, event: Event, value: float) -> None:
        is_better = self._is_better(value)
        # The first value is nothing to stop at, whatever it is.
        self._failures = 0 if is_better or self._failures is None else self._failures + 1
        if is_better:
            self.best, self.best_step = value, event.step
            if self.restore_best:
                self._best_leaves = jax.tree.leaves(_tree.copy(event.state))
        elif self._failures >= max(1, self.patience):
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

    def _warn_of_missing_value(self) -> None:
        if self._to_come and not self._has_seen_values:
            warnings.warn(
                f"EarlyStopping: expected {self.monitor!r} during the run, and it never came. Of "
                f"the hooks before it these were never due: {self._to_come}.",
                stacklevel=2,
            )

    def _end(self, event: RunEnd) -> None:
        self._warn_of_missing_value()
        if self.restore_best and self._best_leaves:
            now, structure = jax.tree.flatten(event.state)
            placed = [_like(x, y) for x, y in zip(self._best_leaves, now, strict=True)]
            event.state = jax.tree.unflatten(structure, placed)


def _like(leaf: Any, other: jax.Array) -> Any:
    """Puts a leaf that comes from a checkpoint where another is."""
    return leaf if isinstance(leaf, jax.Array) else _tree.placed_like(leaf, other)
