"""Collects the logs and values of a run without making the device wait."""

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from functrain.common import _log_values, _tree
from functrain.common._log_values import (
    LastValue,
    LogName,
    SkippedInARow,
    SumOfWeights,
    is_loggable,
    related,
    to_floats,
    to_values,
)
from functrain.common._warnings import warn
from functrain.loop._events import ChunkEnd, EpochEnd, Event
from functrain.loop._finite import LossWatch
from functrain.trainer._history import History


class Recorder:
    """Builds a History from the events of a run.

    Args:
      first_step: The number of steps before the run.
      is_population: True if values are arrays `[N]`, one number per member of a population.
      keeps_steps: False keeps the logs of steps only until the end of their epoch, for the means,
        and keeps no points.

    Attributes:
      first_steps_seconds: The time until the first program had finished, in the process that took
        the last steps; NaN before.
      losses: Watches for losses that are not finite.
      latest: The logs of the last step.
    """

    def __init__(
        self,
        first_step: int = 0,
        is_population: bool = False,
        *,
        keeps_steps: bool = True,
    ) -> None:
        self._is_population, self._keeps_steps = is_population, keeps_steps
        self._first_step = first_step  # the number of steps before the first one that is kept
        # The logs of the epochs before, and those of this epoch.
        self._parts: list[_Part] = []
        self._epoch_parts: list[_Part] = []
        # {"step": ..., "values": ...} of each epoch, and of other events that had values.
        self._epochs: list[dict[str, Any]] = []
        self._within_epochs: list[dict[str, Any]] = []
        self._start_time = self._epoch_start_time = time.perf_counter()
        self.first_steps_seconds, self._has_steps = float("nan"), False
        self._has_warned = False
        self.losses = LossWatch()
        self.latest: dict[str, Any] = {}

    def logs(self, event: ChunkEnd) -> None:
        """Adds the logs of a chunk."""
        logs = event.host_logs()
        if event._has_equal_weight:
            self._warn_of_equal_weights(logs)
        if not self._has_steps:
            self._has_steps = True
            self.first_steps_seconds = time.perf_counter() - self._start_time
            # A history leaves them out.
            rows = _tree.leaves_with_path(event.rows)
            if names := [name for name, row in rows if np.iscomplexobj(row)]:
                advice = "Log jnp.real(x) and jnp.imag(x)."
                warn(f"logs: expected real numbers, got complex {names}. {advice}")
        # In the order in which the history and the progress report show them. Copies: a view would
        # keep device buffers alive.
        logs = {name: logs[name].copy() for name in sorted(logs, key=_rank)}
        examples = np.full(event.steps, event.examples, np.float64)
        self._epoch_parts.append(_Part(examples, logs))
        if len(self._epoch_parts) % _MAX_PARTS == 0:
            self._epoch_parts = _merge(self._epoch_parts)
        self.latest = {name: to_floats(x[-1]) for name, x in logs.items()}
        self.losses.logs(event)

    def _warn_of_equal_weights(self, logs: Iterable[str]) -> None:
        """Warns once that batches of several shapes have equal weights, if the loss has none."""
        if self._has_warned or any(isinstance(name, SumOfWeights) for name in logs):
            return
        self._has_warned = True
        warn(
            "data: expected batches whose arrays share the axis of examples, got several shapes "
            "that do not, so every batch counts once in the means of an epoch. Let the loss return "
            "the number that it was divided by, Aux(model_state, weight=number)."
        )

    def before(self, event: Event) -> None:
        """Adds the epoch's means and metrics to its event, so that hooks see them."""
        if isinstance(event, EpochEnd):
            values = {**to_values(event.metrics()), **self._means()}
            event.values |= {name: values[name] for name in sorted(values, key=_rank)}
            self._keep(self._epoch_parts)
            self._epoch_parts = []

    def after(self, event: Event) -> None:
        """Records the event's values after the hooks, with those that they have added."""
        for name, value in event.values.items():
            if not is_loggable(value, self._is_population):
                raise TypeError(
                    f"event.values[{name!r}]: expected a number, got {_tree.spec(value)}. A "
                    "history holds no arrays and no text: keep them in the hook."
                )
            # A number, not an array of the state: the next program consumes those.
            event.values[name] = to_floats(value)
        values = dict(event.values)
        record = {"step": event.position.step, "values": values}
        if isinstance(event, EpochEnd):
            now = time.perf_counter()
            # A log or a metric of the user's may have this name.
            values.setdefault("seconds", now - self._epoch_start_time)
            self._epochs.append(record)
            self._epoch_start_time = now
        elif self._keeps_steps and values:
            self._within_epochs.append(record)

    def state(self) -> dict[str, Any]:
        """Returns the state of the recorder for a checkpoint."""
        self._parts, self._epoch_parts = _merge(self._parts), _merge(self._epoch_parts)
        names = {name for part in [*self._parts, *self._epoch_parts] for name in part.logs}
        # Copies: training continues while the checkpoint is written.
        return {
            "first_step": self._first_step,
            "parts": [part._asdict() for part in self._parts],
            "epoch_parts": [part._asdict() for part in self._epoch_parts],
            "kinds": {name: type(name).__name__ for name in names if isinstance(name, LogName)},
            "epochs": self._epochs.copy(),
            "within_epochs": self._within_epochs.copy(),
            "epoch_seconds": time.perf_counter() - self._epoch_start_time,
            "first_steps_seconds": self.first_steps_seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint; the history continues from there."""
        kinds = {name: getattr(_log_values, kind) for name, kind in state["kinds"].items()}

        def restored(part: dict[str, Any]) -> _Part:
            logs = {kinds.get(name, str)(name): x for name, x in part["logs"].items()}
            return _Part(part["examples"], logs)

        self._first_step, self._parts = state["first_step"], []
        # The checkpoint may have been saved by a fit that keeps the steps of earlier epochs.
        self._keep(list(map(restored, state["parts"])))
        self._epoch_parts = list(map(restored, state["epoch_parts"]))
        self._epochs = state["epochs"]
        self._within_epochs = state["within_epochs"] if self._keeps_steps else []
        self._epoch_start_time = time.perf_counter() - state["epoch_seconds"]
        # That of an earlier process counts if this process takes no step.
        self.first_steps_seconds = state["first_steps_seconds"]

    def history(self, last_step: int | None = None) -> History:
        """Returns the history so far, or up to a step."""
        last = np.inf if last_step is None else last_step
        epochs = [epoch for epoch in self._epochs if epoch["step"] <= last]
        points: dict[str, list[tuple[int, Any]]] = {}
        for record in self._within_epochs:
            for name, value in record["values"].items() if record["step"] <= last else ():
                points.setdefault(name, []).append((record["step"], value))
        # A dict keeps the order in which the names first appeared.
        names = dict.fromkeys(itertools.chain.from_iterable(epoch["values"] for epoch in epochs))
        count = None if last_step is None else max(0, last_step - self._first_step)
        parts = [*self._parts, *self._epoch_parts] if self._keeps_steps else []
        nan = float("nan")
        return History(
            steps={str(name): x[:count] for name, x in _columns(parts).items()},
            epochs={
                name: _stack([epoch["values"].get(name, nan) for epoch in epochs]) for name in names
            },
            within_epochs={
                name: (np.array([step for step, _ in pairs]), _stack([x for _, x in pairs]))
                for name, pairs in points.items()
            },
            first_steps_seconds=self.first_steps_seconds,
            first_step=self._first_step,
            epoch_ends=np.array([epoch["step"] for epoch in epochs], np.int64),
        )

    def _keep(self, parts: Sequence["_Part"]) -> None:
        """Keeps the logs of an epoch that is over, or only counts its steps."""
        if self._keeps_steps:
            self._parts += _merge(parts)
        else:
            self._first_step += sum(len(part.examples) for part in parts)

    def _means(self) -> dict[str, Any]:
        """Returns the means of the logs of an epoch, weighted by the examples of the steps."""
        means: dict[str, Any] = {}
        parts, rows = self._epoch_parts, _columns(self._epoch_parts)
        counts = [len(part.examples) for part in parts]
        for name, x in rows.items():
            is_reported = np.repeat([name in part.logs for part in parts], counts)
            if isinstance(name, LastValue):
                means[str(name)] = to_floats(x[is_reported][-1])
            # Sums of weights are the weights of the other logs.
            elif not isinstance(name, SumOfWeights):
                examples = np.concatenate([part.examples for part in parts])
                means[name] = to_floats(_mean(name, rows, examples, is_reported))
        return means


class _Part(NamedTuple):
    """The logs of successive steps, all of which reported the same names.

    Attributes:
      examples: The number of examples of each step, `f64[steps]`.
      logs: The logs of each step by name, `[steps]` or `[steps, members]`.
    """

    examples: np.ndarray
    logs: dict[str, np.ndarray]


# After so many parts they are merged: an array for each step would take much memory.
_MAX_PARTS = 1024


def _merge(parts: Iterable[_Part]) -> list[_Part]:
    """Joins successive parts whose logs have the same names."""
    merged = []
    for names, group in itertools.groupby(parts, lambda part: list(part.logs)):
        examples, logs = zip(*group, strict=True)
        columns = {name: np.concatenate([x[name] for x in logs]) for name in names}
        merged.append(_Part(np.concatenate(examples), columns))
    return merged


def _columns(parts: Sequence[_Part]) -> dict[str, np.ndarray]:
    """Returns each log in one array, with NaN for the steps that did not report it."""
    columns: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(part.logs for part in parts)):
        like = next(part.logs[name] for part in parts if name in part.logs)
        dtype = np.float64 if like.dtype.kind in "biu" else like.dtype
        numbers = []
        for part in parts:
            missing = np.full((len(part.examples), *like.shape[1:]), np.nan).astype(dtype)
            numbers.append(part.logs.get(name, missing))
        columns[name] = np.concatenate(numbers)
    return columns


def _mean(
    name: str, rows: dict[str, np.ndarray], examples: np.ndarray, is_reported: np.ndarray
) -> np.ndarray:
    """Returns the mean of a log over the steps that reported it, for each member.

    A step's weight is its sum of weights if the loss is divided by one, otherwise its number of
    examples. Skipped steps have weight 0, unless all steps were skipped.
    """
    # All of these are [steps, 1] or [steps, members].
    values = rows[name].astype(np.float64).reshape(len(examples), -1)
    counts, is_reported = examples[:, None], is_reported[:, None]
    for sums in related(name, SumOfWeights, rows):
        counts = rows[sums].reshape(len(examples), -1)
        # A member that was stopped reports NaN.
        counts = np.where(np.isnan(counts), 1.0, counts)
    is_applied = is_reported
    for count in related(name, SkippedInARow, rows):
        is_applied = is_applied & ~(rows[count].reshape(len(examples), -1) > 0)
    is_applied = np.where(is_applied.any(0), is_applied, is_reported)
    weights = is_applied * counts
    weights = np.where(weights.any(0), weights, is_applied)
    # Values with weight 0 may be NaN.
    total = np.sum(np.where(weights == 0, 0.0, values) * weights, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        means: np.ndarray = total / np.broadcast_to(weights, values.shape).sum(0)
    return means.reshape(rows[name].shape[1:])


def _stack(values: Sequence[Any]) -> np.ndarray:
    """Stacks numbers, or arrays of members' numbers."""
    # A missing value is a single NaN, which becomes NaN for each member.
    return np.stack(np.broadcast_arrays(*values))


def _rank(name: str) -> tuple[int, str]:
    """Returns a sort key that puts the loss first and the learning rate last."""
    return {"loss": 0, "learning_rate": 2}.get(name.split("/")[-1], 1), name
