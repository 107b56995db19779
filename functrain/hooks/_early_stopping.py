"""Stops a run when a monitored value no longer improves."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import numpy as np

from functrain.common import _direction, _tree
from functrain.common._checks import is_number, require
from functrain.common._warnings import warn
from functrain.loop._events import Event, RunEnd


def require_not_negative(**numbers: Any) -> None:
    """Raises ValueError unless all arguments are numbers of at least 0."""
    for name, value in numbers.items():
        require(is_number(value) and value >= 0, name, "a number, 0 or more", value)


@dataclasses.dataclass(eq=False)
class EarlyStopping:
    """A hook that stops the run when a value no longer improves; it can restore the best state.

    The value is compared each time it is reported: each epoch, or whenever an `Evaluate` with
    another `every` has added it. `patience`, `min_delta`, `mode`, `baseline` and `start_from_epoch`
    mean what they mean in ``keras.callbacks.EarlyStopping``, and the run stops after the same
    value.

    Args:
      monitor: Name of the value, such as ``"val_loss"``.
      patience: The number of values in a row without an improvement after which the run stops.
        As in Keras, 0 and 1 both stop at the first one.
      min_delta: The value must be better than the best one by more than this to count as an
        improvement.
      mode: ``"min"`` or ``"max"``, the better direction. ``"auto"`` takes it from the name: `loss`,
        `error`, `mse` and the like should be small, `accuracy`, `auc`, `f1` and the like large.
      baseline: A value that the run must beat: only an improvement that is better than this, too,
        starts the count of `patience` anew. None asks for improvements only.
      start_from_epoch: The number of epochs at the start whose values are ignored.
      restore_best: True restores the state with the best value at the end of the run, stopped
        early or not, as Keras's `restore_best_weights` does. This costs a second copy of the state
        on the device and in every checkpoint; the checkpoint of the run's end has a third.

    Attributes:
      best: The best value so far. NaN is never best: after a first value of NaN, any number is an
        improvement. Keras (3.15) would keep that NaN as its best and stop.
      best_step: The step at which it was reported, or None.
      resume_key: The name of the value; see `functrain.hooks.Hook`.

    Raises:
      ValueError: An argument is out of range, or the name does not imply a direction.

    Warns:
      UserWarning: No value had that name until the end of the run. `fit` refuses such a name before
        the first step, unless a hook is a function, which may add any value.

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

    monitor: str = "val_loss"
    _: dataclasses.KW_ONLY
    patience: int = 0
    min_delta: float = 0.0
    mode: _direction.Mode = "auto"
    baseline: float | None = None
    start_from_epoch: int = 0
    restore_best: bool = False

    # True in the subclass for populations, whose values are `f64[N]`.
    of_members: ClassVar[bool] = False
    # Restores the best state, also if the hook is called on a schedule.
    acts_at_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_not_negative(
            patience=self.patience,
            min_delta=self.min_delta,
            start_from_epoch=self.start_from_epoch,
        )
        is_baseline = self.baseline is None or is_number(self.baseline)
        require(is_baseline, "baseline", "a number, or None", self.baseline)
        self._sign = _direction.sign(self.monitor, self.mode)
        self.mode = "min" if self._sign > 0 else "max"
        self.resume_key = self.monitor
        self._is_restored = False
        self._reset()

    @property
    def best(self) -> Any:
        """The best value so far."""
        return self._best[()]

    @property
    def best_step(self) -> Any:
        """The step at which the best value was seen."""
        return self._best_step.item() if self._best_step >= 0 else None

    def _reset(self) -> None:
        # For a population, these arrays become `[N]` at the first update. A best step of -1 means
        # that there is none.
        self._best = np.asarray(self._sign * math.inf)
        self._best_step = np.asarray(-1)
        self._has_seen_value = False
        # Keras's `wait`: the number of values since the last one that counted as an improvement;
        # -1 before the first value.
        self._failures = np.asarray(-1)
        self._best_leaves: list[Any] = []

    def begin(self) -> None:
        """Resets the hook, unless its state has just been restored."""
        if not self._is_restored:
            self._reset()
        self._is_restored = False

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
        self._has_seen_value = bool((self._failures >= 0).any())
        # Without restore_best the leaves are no longer updated, and would belong to an earlier best
        # value.
        self._best_leaves = state["best_state"] if self.restore_best else []
        # A checkpoint that was saved with restore_best=False has no best state: it is the best one
        # from here on.
        if self._best_leaves or not self.restore_best:
            self._best = np.asarray(state["best"])
            self._best_step = np.asarray(state["best_step"])

    def __call__(self, event: Event, /) -> None:
        """Compares the value with the best one, if the event has it."""
        if isinstance(event, RunEnd):
            if self._best_leaves:
                event.state = self._best_state(event.state)
            if event.step and not (self._has_seen_value or event.was_stopped):
                warn(
                    f"{type(self).__name__}: expected a value {self.monitor!r}, got none in this "
                    "run. Put the evaluation or the hook that adds it before this hook."
                )
        elif self.monitor in event.values:
            self._has_seen_value = True
            if event.epoch >= self.start_from_epoch:
                self._compare(event, event.values[self.monitor])

    def _compare(self, event: Event, value: Any) -> None:
        require(is_number(value), self.monitor, "a number", value, error=TypeError)
        if not self._update(event, np.asarray(float(value)), np.asarray(True)).any():
            self._handle_plateau(event)

    def _handle_plateau(self, event: Event) -> None:
        """Ends the run, as the value has not improved for `patience` values."""
        event.stop()

    def _update(self, event: Event, values: np.ndarray, active: np.ndarray) -> np.ndarray:
        """Compares new values with the best ones.

        Args:
          event: The event.
          values: `f64[]`, for a population `f64[N]`.
          active: `bool[]` or `bool[N]`: False for members that have been stopped.

        Returns:
          `bool[]` or `bool[N]`: True for members that continue.
        """
        is_first = self._failures < 0
        # Keras takes any first value for its best one. Here NaN is never best.
        is_better = self._is_better(values, self._best) | (is_first & ~np.isnan(values))
        is_better &= active
        self._best = np.where(is_better, values, self._best)
        self._best_step = np.where(is_better, event.step, self._best_step)
        # As in Keras, a run never stops at its first value, even NaN.
        is_improvement = is_better | is_first
        restarts = is_improvement
        if self.baseline is not None:
            restarts = is_improvement & self._is_better(values, self.baseline)
        failures = np.where(restarts, 0, np.maximum(self._failures, 0) + 1)
        self._failures = np.where(active, failures, self._failures)
        if self.restore_best and is_better.any():
            self._keep(event.state, is_better)
        # As in Keras, a run does not stop at its best value, even if that is below the baseline.
        is_patient = self._failures < max(1, self.patience)
        continues: np.ndarray = active & (is_patient | is_improvement)
        return continues

    def _is_better(self, values: np.ndarray, reference: Any) -> Any:
        # Keras adds min_delta to the new value as well, and compares in float32, as keras.ops does
        # on JAX. The same rounding leads to the same decision.
        new, old = self._sign * values + self.min_delta, self._sign * reference
        return np.asarray(new, np.float32) < np.asarray(old, np.float32)

    def _keep(self, state: Any, is_better: np.ndarray) -> None:
        """Keeps a copy of the best state. Populations override this, and use `is_better`."""
        # The next program consumes the event's state.
        self._best_leaves = jax.tree.leaves(_tree.copy(state))

    def _best_state(self, state: Any) -> Any:
        """Returns the best state, with the structure and the placement of `state`."""
        leaves, structure = jax.tree.flatten(state)
        return jax.tree.unflatten(structure, self._put_best_leaves(leaves))

    def _put_best_leaves(self, leaves: list[Any]) -> list[Any]:
        """Returns the best leaves, on the devices of the leaves of a state."""
        # Leaves that were read from a checkpoint are NumPy arrays.
        return [
            best if isinstance(best, jax.Array) else _tree.device_put_like(best, leaf)
            for best, leaf in zip(self._best_leaves, leaves, strict=False)
        ]
