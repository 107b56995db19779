"""Collects the logs and values of a run without making the device wait."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.common._values import is_loggable, to_floats, to_values
from functrain.common._warnings import warn
from functrain.engine import _rows
from functrain.loop._events import ChunkEnd, EpochEnd, Event, LogsReady
from functrain.loop._finite import LossWatch
from functrain.step._metered import SUM_OF_WEIGHTS
from functrain.trainer._history import History

# Logs whose last value of the epoch is reported instead of the mean: schedules and counters.
_SKIPPED = "skipped_in_a_row"
_LAST_VALUE_ONLY = ("learning_rate", "loss_scale", "skipped", _SKIPPED)


class Recorder:
    """Builds a History from the events of a run.

    Args:
      first_step: The number of steps before the run.
      is_population: True if values are arrays `[N]`, one number per member of a population.
      keeps_steps: False keeps the logs of steps only until the end of their epoch, for the means,
        and keeps no points.
      warns_of_arrays: True warns about logs that are arrays, which a history leaves out.

    Attributes:
      first_steps_seconds: The time until the first program of this process had finished; NaN until
        then.
      losses: Watches for losses that are not finite.
      latest: The logs of the last step.
    """

    def __init__(
        self,
        first_step: int = 0,
        is_population: bool = False,
        *,
        keeps_steps: bool = True,
        warns_of_arrays: bool = False,
    ) -> None:
        self._first_step, self._is_population = first_step, is_population
        self._keeps_steps, self._warns_of_arrays = keeps_steps, warns_of_arrays
        self._steps: dict[str, _Column] = {}
        self._steps_begin = first_step  # the number of steps before the first one that is kept
        self._has_logs = False
        self._epochs: list[dict[str, Any]] = []  # {"step": last step, "values": ...}
        # {"steps": ..., "values": ...} by name
        self._within_epochs: dict[str, dict[str, list[Any]]] = {}
        self._examples = _Column(np.zeros(0))  # the number of examples of each step of this epoch
        self._start_time = self._epoch_start_time = time.perf_counter()
        self.first_steps_seconds = self._saved_first_steps_seconds = float("nan")
        self.losses = LossWatch()
        self.latest: dict[str, Any] = {}

    def logs(self, event: LogsReady) -> None:
        """Adds the logs of a chunk."""
        if np.isnan(self.first_steps_seconds):
            self.first_steps_seconds = time.perf_counter() - self._start_time
        if self._has_logs and event.logs.keys() != self._steps.keys():
            # A column of the history has a value for every step.
            raise ValueError(
                f"logs: expected the names of the first step, {sorted(self._steps)}, from every "
                f"step, got {sorted(event.logs)} at step {event.step}. Report a value that a batch "
                "does not have as jnp.nan."
            )
        # In the order in which the history and the progress report show them.
        for name, values in sorted(event.logs.items(), key=_rank):
            self._steps.setdefault(name, _Column(values[:0])).extend(values)
            self.latest[name] = to_floats(values[-1])
        self.losses.logs(event)
        self._examples.extend(np.full(event.steps, event.examples, np.float64))
        self._has_logs = True

    def before(self, event: Event) -> None:
        """Adds the epoch's means and metrics to its event, so that hooks see them."""
        if self._warns_of_arrays and isinstance(event, ChunkEnd):
            # Once per run is enough.
            self._warns_of_arrays = False
            _warn_of_arrays(event.rows, self._is_population)
        if isinstance(event, EpochEnd):
            event.values |= self._end_epoch(to_values(event.metrics()))
            if not self._keeps_steps:
                self._steps_begin = event.step
                # Empty columns keep the names and dtypes of the logs.
                self._steps = {n: _Column(x.values()[:0]) for n, x in self._steps.items()}

    def after(self, event: Event) -> None:
        """Records the event's values, including those that hooks have added."""
        for name, value in event.values.items():
            if not is_loggable(value, self._is_population):
                raise TypeError(
                    f"event.values[{name!r}]: expected a number, got {_tree.spec(value)}. A "
                    "history holds no arrays and no text: keep them in the hook."
                )
            # A number, not an array of the state: the next program consumes those.
            event.values[name] = to_floats(value)
        if isinstance(event, EpochEnd):
            now = time.perf_counter()
            values = {**event.values, "seconds": now - self._epoch_start_time}
            self._epochs.append({"step": event.step, "values": values})
            self._epoch_start_time = now
        elif self._keeps_steps:
            for name, value in event.values.items():
                points = self._within_epochs.setdefault(name, {"steps": [], "values": []})
                points["steps"].append(event.step)
                points["values"].append(value)

    def state(self) -> dict[str, Any]:
        """Returns the state of the recorder for a checkpoint."""
        # Copies: training continues while the checkpoint is written.
        return {
            "first_step": self._first_step,
            "steps_begin": self._steps_begin,
            "steps": {name: column.values().copy() for name, column in self._steps.items()},
            "epochs": self._epochs.copy(),
            "within_epochs": {
                name: {"steps": points["steps"].copy(), "values": points["values"].copy()}
                for name, points in self._within_epochs.items()
            },
            "examples": self._examples.values().copy(),
            "epoch_seconds": time.perf_counter() - self._epoch_start_time,
            "first_steps_seconds": self._first_steps_seconds(),
            "has_logs": self._has_logs,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint; the history continues from there."""
        self._first_step = state["first_step"]
        self._steps_begin = state["steps_begin"]
        self._has_logs = state["has_logs"]
        skipped_steps = 0
        if not self._keeps_steps:
            # The checkpoint may have been saved by a fit that keeps the steps of earlier epochs.
            saved_steps = max(map(len, state["steps"].values()), default=0)
            skipped_steps = saved_steps - len(state["examples"])
            self._steps_begin += skipped_steps
        self._steps, self.latest = {}, {}
        for name, values in state["steps"].items():
            self._steps[name] = _Column(values[skipped_steps:])
            if len(values) > skipped_steps:
                self.latest[name] = to_floats(values[-1])
        self._epochs = state["epochs"]
        self._within_epochs = state["within_epochs"] if self._keeps_steps else {}
        self._examples = _Column(state["examples"])
        self._epoch_start_time = time.perf_counter() - state["epoch_seconds"]
        self._saved_first_steps_seconds = state["first_steps_seconds"]

    def history(self, last_step: int | None = None) -> History:
        """Returns the history so far, or up to a step."""
        last = np.inf if last_step is None else last_step
        finished_epochs = [epoch for epoch in self._epochs if epoch["step"] <= last]
        epochs = [epoch["values"] for epoch in finished_epochs]
        within_epochs = {}
        for name, point in self._within_epochs.items():
            steps = [step for step in point["steps"] if step <= last]
            if steps:
                within_epochs[name] = np.array(steps), _stack(point["values"][: len(steps)])
        # A dict keeps the order in which the names first appeared.
        names = dict.fromkeys(itertools.chain.from_iterable(epochs))
        count = None if last_step is None else max(0, last_step - self._steps_begin)
        columns = self._steps if self._keeps_steps else {}
        nan = float("nan")
        return History(
            steps={name: column.values()[:count].copy() for name, column in columns.items()},
            epochs={name: _stack([values.get(name, nan) for values in epochs]) for name in names},
            within_epochs=within_epochs,
            first_steps_seconds=self._first_steps_seconds(),
            first_step=self._steps_begin if self._keeps_steps else self._first_step,
            epoch_ends=np.array([epoch["step"] for epoch in finished_epochs], np.int64),
        )

    def _first_steps_seconds(self) -> float:
        """Returns the time of this process, or of an earlier one if this process took no step."""
        has_steps = not np.isnan(self.first_steps_seconds)
        return self.first_steps_seconds if has_steps else self._saved_first_steps_seconds

    def _end_epoch(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of an epoch: its metrics, and the means of its logs."""
        examples, values = self._examples.values(), dict(metrics)
        self._examples = _Column(np.zeros(0))
        if len(examples):
            rows = {name: x.values()[-len(examples) :] for name, x in self._steps.items()}
            weights = _weights(examples, rows.pop(SUM_OF_WEIGHTS, None), rows.get(_SKIPPED))
            for name, x in rows.items():
                is_last = name.split("/")[-1] in _LAST_VALUE_ONLY
                values[name] = to_floats(x[-1] if is_last else _mean(x.astype(np.float64), weights))
        return dict(sorted(values.items(), key=_rank))


def _weights(
    examples: np.ndarray, sums: np.ndarray | None, skipped: np.ndarray | None
) -> np.ndarray:
    """Returns the weight of each step in the means, `[steps]` or `[steps, members]`.

    A step's weight is its sum of weights if the loss is divided by one, otherwise its number of
    examples. Skipped steps have weight 0, unless all steps were skipped.
    """
    # A member that was stopped reports NaN.
    counts = examples if sums is None else np.where(np.isnan(sums), 1.0, sums)
    applied = np.ones(len(examples)) if skipped is None else 1.0 - (skipped > 0)
    applied = np.where(applied.any(0), applied, 1.0)
    # Transposed, because [steps] and [members, steps] broadcast.
    weights = applied.T * counts.T
    return np.where(weights.any(-1, keepdims=True), weights, applied.T).T


def _mean(values: np.ndarray, weights: np.ndarray) -> Any:
    """Returns the weighted mean over steps; values with weight 0 may be NaN."""
    if weights.ndim > 1:
        return np.array(list(map(_mean, values.T, weights.T)))
    has_weight = weights != 0
    return np.average(values[has_weight], 0, weights[has_weight])


def _warn_of_arrays(rows: PyTree, is_population: bool) -> None:
    """Warns about logs that are arrays, except for PRNG keys."""
    arrays = []
    for path, x in _tree.leaves_with_path(rows):
        if not (_tree.is_key(x) or _rows.is_scalar_per_step(x, is_population)):
            arrays.append(f"{path!r} of shape {list(x.shape[1 + is_population :])}")
    if arrays:
        warn(
            f"logs: expected one number per step{' and member' * is_population}, got "
            f"{', '.join(arrays)}. The history and the loggers leave arrays out. Reduce them in "
            "the step, as with jnp.mean, or read event.logs in your own hook.",
        )


class _Column:
    """An array that grows at its end. It holds copies: a view would keep device buffers alive."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._buffer, self._length = numbers.copy(), len(numbers)

    def extend(self, numbers: np.ndarray) -> None:
        """Appends numbers."""
        end = self._length + len(numbers)
        # Grows by half of its size, so that appending takes constant time on average.
        if end > len(self._buffer):
            size = max(end, 64, 3 * len(self._buffer) // 2)
            larger = np.empty((size, *numbers.shape[1:]), self._buffer.dtype)
            larger[: self._length] = self.values()
            self._buffer = larger
        self._buffer[self._length : end] = numbers
        self._length = end

    def values(self) -> np.ndarray:
        """Returns a view of all numbers so far."""
        return self._buffer[: self._length]


def _stack(values: Sequence[Any]) -> np.ndarray:
    """Stacks numbers, or arrays of members' numbers."""
    # A missing value is a single NaN, which becomes NaN for each member.
    return np.stack(np.broadcast_arrays(*values))


def _rank(item: tuple[str, Any]) -> tuple[int, str]:
    """Returns a sort key that puts the loss first and the learning rate last."""
    name = item[0].split("/")[-1]
    return {"loss": 0, "learning_rate": 2}.get(name, 1), item[0]
