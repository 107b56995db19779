"""Stops a run when a monitored value no longer improves."""

import math
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from functrain.common import _direction, _repr, _tree
from functrain.common._checks import require
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
      >>> from functrain import Position
      >>> from functrain.events import EpochEnd
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
        require(patience >= 0, "patience", "0 or more", patience)
        require(min_delta >= 0, "min_delta", "0 or more", min_delta)
        self._sign = _direction.sign(monitor, mode)
        self.monitor = self.resume_key = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.restore_best = restore_best
        self._to_come: list[Trigger] = []
        self._is_restored = False
        self._reset()

    def __repr__(self) -> str:
        mode = "min" if self._sign > 0 else "max"
        return _repr.call(self, monitor=self.monitor, patience=self.patience, mode=mode)

    @property
    def best(self) -> Any:
        """The best value so far."""
        return self._best.item()

    @property
    def best_step(self) -> Any:
        """The step at which the best value was seen."""
        return self._best_step.item() if self._best_step >= 0 else None

    def _reset(self) -> None:
        # Of a population each becomes one a member, `[N]`.
        self._best = np.asarray(self._sign * math.inf)
        self._best_step = np.asarray(-1)  # for none
        self._failures = np.asarray(-1)  # values since the best one; -1 before the first value
        self._best_leaves: list[Any] = []

    def begin(self) -> None:
        """Resets the hook, unless its state has just been restored."""
        if not self._is_restored:
            self._reset()
        self._is_restored = False

    def comes_after(self, before: Iterable[Any]) -> None:
        """Learns which hooks come before it: the value may be there once each has been due."""
        self._to_come = triggers(before)

    def state(self) -> dict[str, Any]:
        """Returns the best value and its step, the failures since, and the best state's leaves."""
        return {
            "best": self._best.tolist(),
            "best_step": self._best_step.tolist(),
            "failures": self._failures.tolist(),
            "best_state": self._best_leaves,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned, for the run that begins next."""
        self._reset()
        self._is_restored = True
        self._failures = np.asarray(state["failures"])
        best_step = np.asarray(state["best_step"])
        # Leaves that are not updated from here on would be those of an earlier best value.
        self._best_leaves = state["best_state"] if self.restore_best else []
        if self.restore_best and not self._best_leaves and (best_step >= 0).any():
            warnings.warn(
                "restore_best: the checkpoint has no best state, since it was saved with "
                "restore_best=False. The best one is looked for from here on.",
                stacklevel=2,
            )
            return
        self._best, self._best_step = np.asarray(state["best"]), best_step

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
        return bool((self._failures >= 0).any())

    def _compare(self, event: Event, value: Any) -> None:
        self._update(event, np.asarray(float(value)), np.asarray(True))

    def _update(self, event: Event, values: np.ndarray, active: np.ndarray) -> np.ndarray:
        """Takes in the values of a moment; stops the run if none goes on.

        Args:
          event: The event.
          values: `f64[]`, of a population `f64[N]`.
          active: `bool[]` or `bool[N]`: False for members that have been stopped.

        Returns:
          Which go on.
        """
        # Keras adds min_delta to the new value, too, and compares in float32 (on JAX, keras.ops
        # does): the same rounding, so the same decision.
        new, best = self._sign * values + self.min_delta, self._sign * self._best
        is_better = active & (np.asarray(new, np.float32) < np.asarray(best, np.float32))
        self._best = np.where(is_better, values, self._best)
        self._best_step = np.where(is_better, event.step, self._best_step)
        # The first value is nothing to stop at, whatever it is: it counts from -1 to 0.
        self._failures = np.where(is_better, 0, self._failures + active)
        if self.restore_best and is_better.any():
            self._keep(event.state, is_better)
        goes_on: np.ndarray = active & (self._failures < max(1, self.patience))
        if not goes_on.any():
            event.stop()
        return goes_on

    def _keep(self, state: Any, is_better: np.ndarray) -> None:
        """Keeps a state, which is the best one."""
        self._best_leaves = jax.tree.leaves(_tree.copy(state))

    def _best_state(self, state: Any) -> Any:
        """Returns the state that is kept in place of the last one."""
        leaves, structure = jax.tree.flatten(state)
        return jax.tree.unflatten(structure, self._placed(leaves))

    def _placed(self, leaves: list[Any]) -> list[Any]:
        """Returns the kept leaves where those of a state are: those of a checkpoint are not yet."""
        return [
            kept if isinstance(kept, jax.Array) else _tree.device_put_like(kept, leaf)
            for kept, leaf in zip(self._best_leaves, leaves, strict=False)
        ]

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

    def _end(self, event: RunEnd) -> None:
        if self._to_come and not self._has_seen_values:
            warnings.warn(
                f"EarlyStopping: expected {self.monitor!r} during the run, and it never came. Of "
                f"the hooks before it these were never due: {self._to_come}.",
                stacklevel=2,
            )
        if self._best_leaves:
            event.state = self._best_state(event.state)
