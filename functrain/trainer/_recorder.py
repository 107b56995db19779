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
        self._examples = _Column()  # the number of examples of each step of this epoch
        self._start_time = self._epoch_start_time = time.perf_counter()
        # That of an earlier process counts if this process takes no step.
        self._saved_first_steps_seconds = self.first_steps_seconds = float("nan")
        self.losses = LossWatch()
        self.latest: dict[str, Any] = {}

    def logs(self, event: ChunkEnd) -> None:
        """Adds the logs of a chunk."""
        logs = event.host_logs()
        if np.isnan(self.first_steps_seconds):
            self.first_steps_seconds = time.perf_counter() - self._start_time
        # In the order in which the history and the progress report show them.
        for name in sorted(logs, key=_rank):
            if name not in self._steps:
                self._steps[name] = _Column()
                if steps_before := event.step - event.steps - self._steps_begin:
                    self._steps[name].extend_missing(steps_before, logs[name])
            self._steps[name].extend(logs[name])
        # A column of the history has a value for every step.
        for name in self._steps.keys() - logs.keys():
            self._steps[name].extend_missing(event.steps)
        self.latest = {name: to_floats(logs[name][-1]) for name in self._steps if name in logs}
        self.losses.logs(event)
        self._examples.extend(np.full(event.steps, event.examples, np.float64))

    def before(self, event: Event) -> None:
        """Adds the epoch's means and metrics to its event, so that hooks see them."""
        if self._warns_of_arrays and isinstance(event, ChunkEnd):
            # Once per run is enough.
            self._warns_of_arrays = False
            _warn_of_arrays(event.rows, self._is_population)
        if isinstance(event, EpochEnd):
            values = {**to_values(event.metrics()), **self._means()}
            event.values |= {name: values[name] for name in sorted(values, key=_rank)}
            self._examples = _Column()
            if not self._keeps_steps:
                self._steps_begin = event.step
                # Empty columns keep the names, dtypes and shapes of the logs.
                self._steps = {n: _Column(x.numbers()[:0]) for n, x in self._steps.items()}

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
            "steps": {name: column.numbers() for name, column in self._steps.items()},
            "reported": {name: column.is_reported() for name, column in self._steps.items()},
            "kinds": {n: type(n).__name__ for n in self._steps if isinstance(n, LogName)},
            "epochs": self._epochs.copy(),
            "within_epochs": {
                name: {"steps": points["steps"].copy(), "values": points["values"].copy()}
                for name, points in self._within_epochs.items()
            },
            "examples": self._examples.numbers(),
            "epoch_seconds": time.perf_counter() - self._epoch_start_time,
            "first_steps_seconds": self._first_steps_seconds(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint; the history continues from there."""
        self._first_step = state["first_step"]
        self._steps_begin = state["steps_begin"]
        self._examples = _Column(state["examples"])
        skipped = 0
        if not self._keeps_steps:
            # The checkpoint may have been saved by a fit that keeps the steps of earlier epochs.
            skipped = max(map(len, state["steps"].values()), default=0) - len(state["examples"])
            self._steps_begin += skipped
        self._steps, self.latest = {}, {}
        for name, numbers in state["steps"].items():
            if name in state["kinds"]:
                name = getattr(_log_values, state["kinds"][name])(name)
            self._steps[name] = _Column(numbers[skipped:], state["reported"][name][skipped:])
            if len(numbers) > skipped:
                self.latest[name] = to_floats(numbers[-1])
        self._epochs = state["epochs"]
        self._within_epochs = state["within_epochs"] if self._keeps_steps else {}
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
            steps={str(name): column.numbers()[:count] for name, column in columns.items()},
            epochs={name: _stack([values.get(name, nan) for values in epochs]) for name in names},
            within_epochs=within_epochs,
            first_steps_seconds=self._first_steps_seconds(),
            first_step=self._steps_begin if self._keeps_steps else self._first_step,
            epoch_ends=np.array([epoch["step"] for epoch in finished_epochs], np.int64),
        )

    def _first_steps_seconds(self) -> float:
        has_steps = not np.isnan(self.first_steps_seconds)
        return self.first_steps_seconds if has_steps else self._saved_first_steps_seconds

    def _means(self) -> dict[str, Any]:
        """Returns the means of the logs of an epoch, weighted by the examples of the steps."""
        examples, means = self._examples.numbers(), dict[str, Any]()
        n = len(examples)
        rows = {name: column.numbers()[-n:] for name, column in self._steps.items()} if n else {}
        for name, x in rows.items():
            is_reported = self._steps[name].is_reported()[-n:]
            # The weights are those of the other logs; another epoch may have had this log.
            if isinstance(name, SumOfWeights) or not is_reported.any():
                continue
            if isinstance(name, LastValue):
                means[str(name)] = to_floats(x[is_reported][-1])
            else:
                weights = _weights(name, rows, examples, is_reported)
                means[name] = to_floats(_mean(name, x.astype(np.float64), weights))
        return means


def _weights(
    name: str, rows: dict[str, np.ndarray], examples: np.ndarray, is_reported: np.ndarray
) -> np.ndarray:
    """Returns the weight of each step in the mean of a log, `[steps, 1]` or `[steps, members]`.

    A step's weight is its sum of weights if the loss is divided by one, otherwise its number of
    examples. Skipped steps have weight 0, unless all steps were skipped.
    """
    counts = examples[:, None]
    for sums in _log_values.nearest(name, [x for x in rows if isinstance(x, SumOfWeights)]):
        counts = rows[sums].reshape(len(examples), -1)
        # A member that was stopped reports NaN.
        counts = np.where(np.isnan(counts), 1.0, counts)
    is_applied = is_reported[:, None]
    for count in _log_values.skip_counts(name, rows):
        is_applied = is_applied & ~(rows[count].reshape(len(examples), -1) > 0)
    is_applied = np.where(is_applied.any(0), is_applied, is_reported[:, None])
    weights: np.ndarray = is_applied * counts
    return np.where(weights.any(0), weights, is_applied)


def _mean(name: str, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the weighted mean over steps; values with weight 0 may be NaN."""
    members = values.reshape(len(values), -1)
    weights = np.broadcast_to(weights, members.shape)
    totals = weights.sum(0)
    if not totals.all():
        warn(
            f"{name}: expected weights with a sum other than 0 in each epoch, got weights from "
            f"{weights.min():.4g} to {weights.max():.4g}. Its mean is NaN. Pass weights that are "
            "not negative."
        )
    sums = np.sum(np.where(weights == 0, 0.0, members) * weights, axis=0)
    means = np.full(len(totals), np.nan)
    np.divide(sums, totals, out=means, where=totals != 0)
    return means.reshape(values.shape[1:])


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
            "event.logs in your own hook."
        )


class _Column:
    """The numbers of a log, one for each step: NaN where the step did not report it.

    They are copies: a view would keep device buffers alive.
    """

    def __init__(self, *first: np.ndarray) -> None:
        self._numbers: list[np.ndarray] = []
        self._is_reported: list[np.ndarray] = []
        if first:
            self.extend(*first)

    def extend(self, numbers: np.ndarray, is_reported: np.ndarray | None = None) -> None:
        """Appends numbers."""
        flags = np.ones(len(numbers), bool) if is_reported is None else is_reported
        self._numbers.append(numbers.copy())
        self._is_reported.append(flags)
        if len(self._numbers) > _MAX_PARTS:
            self._numbers, self._is_reported = [self.numbers()], [self.is_reported()]

    def extend_missing(self, count: int, like: np.ndarray | None = None) -> None:
        """Appends NaN for steps that did not report the number, of the shape of others."""
        like = self._numbers[-1] if like is None else like
        dtype = np.float64 if like.dtype.kind in "biu" else like.dtype
        numbers = np.full((count, *like.shape[1:]), np.nan).astype(dtype)
        self.extend(numbers, np.zeros(count, bool))

    def numbers(self) -> np.ndarray:
        """Returns all numbers so far in a new array; another dtype of some makes it float64."""
        dtypes = {x.dtype for x in self._numbers}
        numbers = np.concatenate(self._numbers or [np.zeros(0)])
        return numbers.astype(np.float64) if len(dtypes) > 1 else numbers

    def is_reported(self) -> np.ndarray:
        """Returns `bool[steps]`, False for the steps that did not report the number."""
        return np.concatenate(self._is_reported or [np.zeros(0, bool)])


# A column of more parts is made one: an array for each step would take much memory.
_MAX_PARTS = 1024


def _stack(values: Sequence[Any]) -> np.ndarray:
    """Stacks numbers, or arrays of members' numbers."""
    # A missing value is a single NaN, which becomes NaN for each member.
    return np.stack(np.broadcast_arrays(*values))


def _rank(name: str) -> tuple[int, str]:
    """Returns a sort key that puts the loss first and the learning rate last."""
    return {"loss": 0, "learning_rate": 2}.get(name.split("/")[-1], 1), name
