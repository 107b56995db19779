"""Collects the logs and values of a run without making the device wait."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from functrain.common import _log_values, _tree
from functrain.common._log_values import (
    LastValue,
    LogName,
    SumOfWeights,
    is_loggable,
    to_floats,
    to_values,
)
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.loop._events import ChunkEnd, EpochEnd, Event, is_scalar_per_step
from functrain.loop._finite import LossWatch
from functrain.trainer._history import History


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
        self._epochs: list[dict[str, Any]] = []  # {"step": last step, "values": ...}
        # {"steps": ..., "values": ...} by name
        self._within_epochs: dict[str, dict[str, list[Any]]] = {}
        self._examples = _Column(np.zeros(0))  # the number of examples of each step of this epoch
        self._start_time = self._epoch_start_time = time.perf_counter()
        self.first_steps_seconds = self._saved_first_steps_seconds = float("nan")
        self.losses = LossWatch()
        self.latest: dict[str, Any] = {}

    def logs(self, event: ChunkEnd) -> None:
        """Adds the logs of a chunk."""
        logs = event.host_logs()
        if np.isnan(self.first_steps_seconds):
            self.first_steps_seconds = time.perf_counter() - self._start_time
        self.latest = {}
        # In the order in which the history and the progress report show them.
        for name, values in sorted(logs.items(), key=_rank):
            if name not in self._steps:
                self._steps[name] = _Column(values[:0])
                self._steps[name].extend_missing(event.step - event.steps - self._steps_begin)
            self._steps[name].extend(values)
            self.latest[name] = to_floats(values[-1])
        # A column of the history has a value for every step.
        for name in self._steps.keys() - logs.keys():
            self._steps[name].extend_missing(event.steps)
        self.losses.logs(event)
        self._examples.extend(np.full(event.steps, event.examples, np.float64))

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
            values = dict(event.values)
            # A log or a metric of the user's may have this name.
            values.setdefault("seconds", now - self._epoch_start_time)
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
            "missing": {name: column.missing.copy() for name, column in self._steps.items()},
            "kinds": {n: type(n).__name__ for n in self._steps if isinstance(n, LogName)},
            "epochs": self._epochs.copy(),
            "within_epochs": {
                name: {"steps": points["steps"].copy(), "values": points["values"].copy()}
                for name, points in self._within_epochs.items()
            },
            "examples": self._examples.values().copy(),
            "epoch_seconds": time.perf_counter() - self._epoch_start_time,
            "first_steps_seconds": self._first_steps_seconds(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint; the history continues from there."""
        self._first_step = state["first_step"]
        self._steps_begin = state["steps_begin"]
        skipped_steps = 0
        if not self._keeps_steps:
            # The checkpoint may have been saved by a fit that keeps the steps of earlier epochs.
            saved_steps = max(map(len, state["steps"].values()), default=0)
            skipped_steps = saved_steps - len(state["examples"])
            self._steps_begin += skipped_steps
        self._steps, self.latest = {}, {}
        for name, values in state["steps"].items():
            if name in state["kinds"]:
                name = getattr(_log_values, state["kinds"][name])(name)
            column = self._steps[name] = _Column(values[skipped_steps:])
            for begin, end in state["missing"][name]:
                column.missing.append((max(0, begin - skipped_steps), max(0, end - skipped_steps)))
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
            steps={str(name): column.values()[:count].copy() for name, column in columns.items()},
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
        n = len(examples)
        if n:
            rows = {name: x.values()[-n:] for name, x in self._steps.items()}
            for name, x in rows.items():
                has_value = self._steps[name].has_value()[-n:]
                # The weights are those of the other logs; another epoch may have had this log.
                if isinstance(name, SumOfWeights) or not has_value.any():
                    continue
                if isinstance(name, LastValue):
                    values[str(name)] = to_floats(x[has_value][-1])
                else:
                    weights = _weights(name, rows, examples, has_value)
                    values[name] = to_floats(_mean(name, x.astype(np.float64), weights))
        return dict(sorted(values.items(), key=_rank))


def _weights(
    name: str, rows: dict[str, np.ndarray], examples: np.ndarray, has_value: np.ndarray
) -> np.ndarray:
    """Returns the weight of each step in the mean of a log, `[steps, 1]` or `[steps, members]`.

    A step's weight is its sum of weights if the loss is divided by one, otherwise its number of
    examples. Skipped steps have weight 0, unless all steps were skipped.
    """
    counts = examples.reshape(-1, 1)
    for sums in _log_values.nearest(name, [x for x in rows if isinstance(x, SumOfWeights)]):
        counts = rows[sums].reshape(len(examples), -1)
        # A member that was stopped reports NaN.
        counts = np.where(np.isnan(counts), 1.0, counts)
    has_value = has_value.reshape(-1, 1)
    is_applied = has_value
    for count in _log_values.skip_counts(name, rows):
        is_applied = is_applied & ~(rows[count].reshape(len(examples), -1) > 0)
    is_applied = np.where(is_applied.any(0), is_applied, has_value)
    weights: np.ndarray = is_applied * counts
    return np.where(weights.any(0), weights, is_applied)


def _mean(name: str, values: np.ndarray, weights: np.ndarray) -> Any:
    """Returns the weighted mean over steps; values with weight 0 may be NaN."""
    if weights.shape[1] > 1:
        members = zip(values.T, weights.T, strict=True)
        return np.array([_mean(name, x, weight.reshape(-1, 1)) for x, weight in members])
    if weights.sum() == 0:
        warn(
            f"{name}: expected weights with a sum other than 0 in each epoch, got weights from "
            f"{weights.min():.4g} to {weights.max():.4g}. Its mean is NaN. Pass weights that are "
            "not negative."
        )
        return np.full(values.shape[1:], np.nan)
    has_weight = weights[:, 0] != 0
    return np.average(values[has_weight], 0, weights[has_weight, 0])


def _warn_of_arrays(rows: PyTree, is_population: bool) -> None:
    """Warns about logs that are arrays, except for PRNG keys."""
    arrays = []
    for path, x in _tree.leaves_with_path(rows):
        if not (_tree.is_key(x) or is_scalar_per_step(x, is_population)):
            arrays.append(f"{path!r}, {_tree.format_spec(x.dtype, x.shape[1 + is_population :])}")
    if arrays:
        warn(
            f"logs: expected one real number per step{' and member' * is_population}, got "
            f"{', '.join(arrays)}. The history and the loggers leave others out. Reduce arrays in "
            "the step, as with jnp.mean, split complex numbers with jnp.real and jnp.imag, or read "
            "event.logs in your own hook.",
        )


class _Column:
    """An array that grows at its end. It holds copies: a view would keep device buffers alive."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._buffer, self._length = numbers.copy(), len(numbers)
        # The beginnings and ends of the steps that have no number.
        self.missing: list[tuple[int, int]] = []

    def extend(self, numbers: np.ndarray) -> None:
        """Appends numbers."""
        if numbers.dtype != self._buffer.dtype:
            # The log of another program may have another dtype.
            self._buffer, numbers = self._buffer.astype(np.float64), numbers.astype(np.float64)
        end = self._length + len(numbers)
        # Grows by half of its size, so that appending takes constant time on average.
        if end > len(self._buffer):
            size = max(end, 64, 3 * len(self._buffer) // 2)
            larger = np.empty((size, *numbers.shape[1:]), self._buffer.dtype)
            larger[: self._length] = self.values()
            self._buffer = larger
        self._buffer[self._length : end] = numbers
        self._length = end

    def extend_missing(self, count: int) -> None:
        """Appends NaN for steps that did not report the number."""
        if count:
            self.missing.append((self._length, self._length + count))
            is_integer = self._buffer.dtype.kind in "biu"
            dtype = np.float64 if is_integer else self._buffer.dtype
            self.extend(np.full((count, *self._buffer.shape[1:]), np.nan).astype(dtype))

    def has_value(self) -> np.ndarray:
        """Returns `bool[steps]`, False for the steps that did not report the number."""
        has_value = np.ones(self._length, bool)
        for begin, end in self.missing:
            has_value[begin:end] = False
        return has_value

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
