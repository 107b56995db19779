"""The base of loggers: lines in order, without waiting for the device."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from functrain.common import _repr
from functrain.common._checks import require_integer
from functrain.common._values import is_loggable, split_members
from functrain.loop._events import ChunkEnd, EpochEnd, Event, LogsReady


class Line(NamedTuple):
    """What there is to write of one moment.

    Attributes:
      step: Steps taken since the training began.
      epoch: Number of the epoch.
      values: Numbers by name, those of a population's members under ``name/0``, ``name/1``, ...
      samples: Pictures `u8[H, W, C]` and texts by name.
    """

    step: int
    epoch: int
    values: dict[str, float]
    samples: dict[str, np.ndarray | str]


class Logger:
    """A hook that writes down what steps report, one program late, and what hooks have added.

    An error while it writes does not end the run: it warns once.

    Args:
      steps: Write what every so many steps report; of other steps only what hooks have added.
        None: write what the steps report at which the logger is called.
      **shown: What `repr` shows.
    """

    only_first = True  # of several processes
    epoch_prefix = "epoch/"  # in front of the values of an epoch

    def __init__(self, steps: int | None, /, **shown: Any) -> None:
        if steps is not None:
            require_integer("every", steps)
        self.steps, self._shown = steps, shown
        self._waiting: list[Line] = []  # for what their step reported
        self._has_warned = False

    def __repr__(self) -> str:
        return _repr.call(self, **self._shown)

    def __call__(self, event: Event, /) -> None:
        """Takes in what hooks have added, and what an epoch came to."""
        prefix = self.epoch_prefix if isinstance(event, EpochEnd) else ""
        # fit refuses what is no number after all hooks have been called.
        numbers = {n: x for n, x in event.values.items() if is_loggable(x, event._of_members)}
        values = {f"{prefix}{name}": x for name, x in split_members(numbers).items()}
        if values or event.samples or self.steps is None:
            self._waiting.append(Line(event.step, event.epoch, values, dict(event.samples)))
        if not isinstance(event, ChunkEnd):
            self._write_waiting()

    def logs(self, event: LogsReady, /) -> None:
        """Takes in what the steps of a chunk reported."""
        first = event.step - event.steps + 1
        lines: list[Line] = []
        for step in self._written_steps(first, event.step) if event.logs else ():
            reported = {name: x[step - first] for name, x in event.logs.items()}
            lines.append(Line(step, event.epoch, split_members(reported), {}))
        for line in self._waiting:
            if lines and lines[-1].step == line.step:
                line = line._replace(values={**lines.pop().values, **line.values})
            lines.append(line)
        self._waiting = lines
        self._write_waiting()

    def _written_steps(self, first: int, last: int) -> range:
        """Returns which steps of a chunk are written."""
        if self.steps is None:
            return range(last, last + bool(self._waiting))
        return range(first + -first % self.steps, last + 1, self.steps)

    def _write_waiting(self) -> None:
        lines, self._waiting = self._waiting, []
        if lines:
            with self._errors_warned_of():
                self.write(lines)

    def close(self) -> None:
        """Writes what is left, and ends."""
        self._write_waiting()
        with self._errors_warned_of():
            self.end()

    @contextlib.contextmanager
    def _errors_warned_of(self) -> Iterator[None]:
        """Suppresses errors, and warns of the first one: logs are not worth a training."""
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self!r} could not write: {type(error).__name__}: {error}. The training "
                    "continues; lines of this log are missing from here on.",
                    stacklevel=4,
                )

    def begin(self) -> None:
        """Begins, or fails before a step is taken."""

    def write(self, lines: Sequence[Line]) -> None:
        """Writes lines, in the order of their steps."""
        raise NotImplementedError

    def end(self) -> None:
        """Ends: nothing else is to come."""

    def state(self) -> dict[str, Any]:
        """Makes sure that what was written is kept; returns what to save."""
        return {}

    def restore(self, state: dict[str, Any], /) -> None:
        """Goes on where `state` was returned."""
