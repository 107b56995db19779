"""Gathers what a run reports, without making the device wait."""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.common._values import is_loggable, to_floats, to_values
from functrain.engine import _rows
from functrain.loop._events import ChunkEnd, EpochEnd, Event, LogsReady
from functrain.loop._finite import LossWatch
from functrain.step._metered import SUM_OF_WEIGHTS
from functrain.trainer._history import History

# Logs whose last value of the epoch is reported instead of the mean: schedules and counters.
_SKIPPED = "skipped_in_a_row"
_AT_THE_END = ("learning_rate", "loss_scale", "skipped", _SKIPPED)


class Recorder:
    """Makes a History of a run's events.

    Args:
      first_step: Steps taken before.
      of_members: Whether the values are those of a population: `[N]`, one a member.
      keeps_steps: False keeps the steps of an epoch only until its end, for the means, and no
        points.
      warns_of_arrays: Whether to warn of logs that are arrays, which no history has.

    Attributes:
      first_steps_seconds: How long the first program took in this process; NaN before its end.
      losses: Watches for losses that are not finite.
      latest: The logs of the last step.
    """

    def __init__(
        self,
        first_step: int = 0,
        of_members: bool = False,
        *,
        keeps_steps: bool = True,
        warns_of_arrays: bool = False,
    ) -> None:
        self._first_step, self._of_members = first_step, of_members
        self._keeps_steps, self._warns_of_arrays = keeps_steps, warns_of_arrays
        self._steps: dict[str, _Column] = {}
        self._steps_begin = first_step  # steps taken before the first one that is kept
        self._has_logs = False
        self._epochs: list[dict[str, Any]] = []  # of each its last step, and its values
        self._points: dict[str, dict[str, list[Any]]] = {}  # of each name steps, and values
        self._examples = _Column(np.zeros(0))  # of each step of this epoch
        self._began = self._epoch_began = time.perf_counter()
        self.first_steps_seconds = self._saved_first_steps_seconds = float("nan")
        self.losses = LossWatch()
        self.latest: dict[str, Any] = {}

    def logs(self, event: LogsReady) -> None:
        """Takes in a chunk's logs."""
        if np.isnan(self.first_steps_seconds):
            self.first_steps_seconds = time.perf_counter() - self._began
        if self._has_logs and event.logs.keys() != self._steps.keys():
            raise ValueError(
                f"logs: expected the names of the first step, {sorted(self._steps)}, from every "
                f"step, got {sorted(event.logs)} at step {event.step}. Report a value that a batch "
                "does not have as jnp.nan."
            )
        for name, values in sorted(event.logs.items(), key=_rank):
            self._steps.setdefault(name, _Column(values[:0])).extend(values)
            self.latest[name] = to_floats(values[-1])
        self.losses.logs(event)
        self._examples.extend(np.full(event.steps, event.examples, np.float64))
        self._has_logs = True

    def before(self, event: Event) -> None:
        """Puts an epoch's means and metrics into its event, for hooks to see."""
        if self._warns_of_arrays and isinstance(event, ChunkEnd):
            self._warns_of_arrays = False  # once a run
            _warn_of_arrays(event.rows, self._of_members)
        if isinstance(event, EpochEnd):
            event.values |= self._end_epoch(to_values(event.metrics()))
            if not self._keeps_steps:
                self._steps_begin = event.step
                self._steps = {n: _Column(x.values()[:0]) for n, x in self._steps.items()}

    def after(self, event: Event) -> None:
        """Keeps the event's values, with what hooks have added."""
        for name, value in event.values.items():
            if not is_loggable(value, self._of_members):
                raise TypeError(
                    f"event.values[{name!r}]: expected a number, got {_tree.spec(value)}. Arrays "
                    "and texts have no place in the history: keep them in the hook."
                )
        if isinstance(event, EpochEnd):
            now = time.perf_counter()
            values = {**event.values, "seconds": now - self._epoch_began}
            self._epochs.append({"step": event.step, "values": values})
            self._epoch_began = now
        elif self._keeps_steps:
            for name, value in event.values.items():
                points = self._points.setdefault(name, {"steps": [], "values": []})
                points["steps"].append(event.step)
                points["values"].append(value)

    def state(self) -> dict[str, Any]:
        """Returns everything so far, and the steps of the current epoch, to be saved."""
        return {
            "first_step": self._first_step,
            "steps_begin": self._steps_begin,
            "steps": {name: column.values().copy() for name, column in self._steps.items()},
            "epochs": self._epochs.copy(),
            "points": {
                name: {"steps": points["steps"].copy(), "values": points["values"].copy()}
                for name, points in self._points.items()
            },
            "examples": self._examples.values().copy(),
            "epoch_seconds": time.perf_counter() - self._epoch_began,
            "first_steps_seconds": self._first_steps_seconds(),
            "has_logs": self._has_logs,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned: the history continues from there."""
        self._first_step = state["first_step"]
        self._steps_begin = state["steps_begin"]
        self._has_logs = state["has_logs"]
        left_out = 0
        if not self._keeps_steps:  # those before the current epoch, which may have been saved
            saved = max(map(len, state["steps"].values()), default=0)
            left_out = saved - len(state["examples"])
            self._steps_begin += left_out
        self._steps = {name: _Column(values[left_out:]) for name, values in state["steps"].items()}
        self._epochs = state["epochs"]
        self._points = state["points"] if self._keeps_steps else {}
        self._examples = _Column(state["examples"])
        self._epoch_began = time.perf_counter() - state["epoch_seconds"]
        self._saved_first_steps_seconds = state["first_steps_seconds"]
        columns = {name: x.values() for name, x in self._steps.items()}
        self.latest = {
            name: to_floats(values[-1]) for name, values in columns.items() if len(values)
        }

    def history(self, last_step: int | None = None) -> History:
        """Returns everything so far, or up to a step."""
        last = np.inf if last_step is None else last_step
        epochs = [epoch["values"] for epoch in self._epochs if epoch["step"] <= last]
        points = {}
        for name, kept in self._points.items():
            steps = [step for step in kept["steps"] if step <= last]
            if steps:
                points[name] = np.array(steps), _stacked(kept["values"][: len(steps)])
        names = dict.fromkeys(name for values in epochs for name in values)
        count = None if last_step is None else max(0, last_step - self._steps_begin)
        columns = self._steps if self._keeps_steps else {}
        nan = float("nan")
        return History(
            steps={name: column.values()[:count].copy() for name, column in columns.items()},
            epochs={n: _stacked([values.get(n, nan) for values in epochs]) for n in names},
            points=points,
            first_steps_seconds=self._first_steps_seconds(),
            first_step=self._steps_begin if self._keeps_steps else self._first_step,
        )

    def _first_steps_seconds(self) -> float:
        """Returns those of this process; those of an earlier one where this took no step."""
        own = self.first_steps_seconds
        return self._saved_first_steps_seconds if np.isnan(own) else own

    def _end_epoch(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns the values of an epoch: its metrics, and the means of what its steps reported."""
        examples, values = self._examples.values(), dict(metrics)
        self._examples = _Column(np.zeros(0))
        if len(examples):
            rows = {name: x.values()[-len(examples) :] for name, x in self._steps.items()}
            weights = _weights(examples, rows.pop(SUM_OF_WEIGHTS, None), rows.get(_SKIPPED))
            for name, x in rows.items():
                is_last = name.split("/")[-1] in _AT_THE_END
                values[name] = to_floats(x[-1] if is_last else _mean(x.astype(np.float64), weights))
        return dict(sorted(values.items(), key=_rank))


def _weights(
    examples: np.ndarray, sums: np.ndarray | None, skipped: np.ndarray | None
) -> np.ndarray:
    """Returns what each step counts in means, `[steps]` or `[steps, members]`.

    That is its sum of weights where the loss is divided by one, else its number of examples, and
    nothing where it was skipped, unless all were.
    """
    # NaN: a member that was stopped.
    counts = examples if sums is None else np.where(np.isnan(sums), 1.0, sums)
    taken = np.ones(len(examples)) if skipped is None else 1.0 - (skipped > 0)
    taken = np.where(taken.any(0), taken, 1.0)
    weights = taken.T * counts.T  # transposed, [steps] and [members, steps] broadcast
    return np.where(weights.any(-1, keepdims=True), weights, taken.T).T


def _mean(values: np.ndarray, weights: np.ndarray) -> Any:
    """Averages over steps; what counts for nothing may be NaN."""
    if weights.ndim > 1:
        members = zip(values.T, weights.T, strict=True)
        return np.array([_mean(*member) for member in members])
    counts = weights != 0
    return np.average(values[counts], 0, weights[counts])


def _warn_of_arrays(rows: PyTree, of_members: bool) -> None:
    """Warns of logs that are arrays, but for keys."""
    arrays = [
        f"{path!r} of shape {list(x.shape[1 + of_members :])}"
        for path, x in _tree.leaves_with_path(rows)
        if not (_tree.is_key(x) or _rows.is_scalar_per_step(x, of_members))
    ]
    if arrays:
        warnings.warn(
            f"logs: expected one number a step{' and member' * of_members}, got "
            f"{', '.join(arrays)}. The history and the loggers leave it out. Reduce it in the "
            "step, as by jnp.mean, or read it in a hook of your own: event.logs.",
            stacklevel=7,  # the line that called fit
        )


class _Column:
    """Numbers that grow more: copies, so that no buffer of a device is kept alive by a view."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers, self._n = numbers.copy(), len(numbers)

    def extend(self, numbers: np.ndarray) -> None:
        """Adds numbers at the end."""
        end = self._n + len(numbers)
        if end > len(self._numbers):
            size = max(end, 64, 3 * len(self._numbers) // 2)
            larger = np.empty((size, *numbers.shape[1:]), self._numbers.dtype)
            larger[: self._n] = self.values()
            self._numbers = larger
        self._numbers[self._n : end] = numbers
        self._n = end

    def values(self) -> np.ndarray:
        """Returns all numbers so far: a view."""
        return self._numbers[: self._n]


def _stacked(values: Sequence[Any]) -> np.ndarray:
    """Stacks numbers, or those of members: a missing one is missing for all of them."""
    each = next((np.shape(x) for x in values if np.ndim(x)), ())
    return np.array([np.broadcast_to(x, each) for x in values])


def _rank(item: tuple[str, Any]) -> tuple[int, str]:
    """Sorts the loss first and the learning rate last."""
    name = item[0].split("/")[-1]
    return {"loss": 0, "learning_rate": 2}.get(name, 1), item[0]
