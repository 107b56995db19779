"""The base of loggers: lines in order, without waiting for the device."""

import abc
import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from functrain.common import _repr
from functrain.common._values import is_value, spread
from functrain.engine._position import require_whole
from functrain.loop._events import ChunkEnd, EpochEnd, Event, LogsReady


class Line(NamedTuple):
    """What there is to write of one moment.

    Attributes:
      step: Steps taken since the training began.
      epoch: Number of the epoch.
      values: Numbers by name; those of an epoch as a whole under ``epoch/``, those of a
        population's members under ``name/0``, ``name/1``, ...
      samples: Pictures `u8[H, W, C]` and texts by name.
    """

    step: int
    epoch: int
    values: dict[str, float]
    samples: dict[str, np.ndarray | str]


class LoggingErrors:
    """Turns errors of a logger into one warning: logs are not worth a training.

    Args:
      logger: The hook, which the warning shows.
    """

    def __init__(self, logger: Any) -> None:
        self._logger, self._has_warned = logger, False

    @contextlib.contextmanager
    def warned_of(self) -> Iterator[None]:
        """Suppresses errors, and warns of the first one."""
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self._logger!r} could not write: {type(error).__name__}: {error}. The "
                    "training continues; lines of this log are missing from here on.",
                    stacklevel=4,
                )


class Logger(abc.ABC):
    """A hook that writes down what steps report, one program late, and what hooks have added.

    An error while it writes does not end the run: it warns once.

    Args:
      steps: Write what every so many steps report; of other steps only what hooks have added.
      **shown: What else `repr` shows.
    """

    only_first = True  # of several processes

    def __init__(self, steps: int, **shown: Any) -> None:
        require_whole("steps", steps)
        self.steps, self._shown = steps, shown
        self._waiting: list[Line] = []  # for what their step reported
        self._errors = LoggingErrors(self)

    def __repr__(self) -> str:
        return _repr.call(self, **self._shown, steps=self.steps)

    def __call__(self, event: Event, /) -> None:
        """Takes in what hooks have added, and what an epoch came to."""
        prefix = "epoch/" if isinstance(event, EpochEnd) else ""
        # What is no number is refused in words after all hooks have been called.
        found = {n: x for n, x in event.values.items() if is_value(x, event._of_members)}
        values = {f"{prefix}{n}": x for n, x in spread(found).items()}
        if values or event.samples:
            self._waiting.append(Line(event.step, event.epoch, values, dict(event.samples)))
        if not isinstance(event, ChunkEnd):
            self._write_waiting()

    def logs(self, event: LogsReady, /) -> None:
        """Takes in what the steps of a chunk reported."""
        skipped = -(event.step - event.steps + 1) % self.steps
        logs = {n: x for name, x in event.logs.items() for n, x in _columns(name, x)}
        columns = [values[skipped :: self.steps].tolist() for values in logs.values()]
        steps = range(event.step - event.steps + 1 + skipped, event.step + 1, self.steps)
        lines = [
            Line(step, event.epoch, dict(zip(logs, row, strict=True)), {})
            for step, row in zip(steps, zip(*columns, strict=True), strict=False)
        ]
        for line in self._waiting:
            if lines and lines[-1].step == line.step:
                line = line._replace(values={**lines.pop().values, **line.values})
            lines.append(line)
        self._waiting = lines
        self._write_waiting()

    def _write_waiting(self) -> None:
        lines, self._waiting = self._waiting, []
        if lines:
            with self._errors.warned_of():
                self.write(lines)

    def close(self) -> None:
        """Writes what is left, and ends."""
        self._write_waiting()
        with self._errors.warned_of():
            self.end()

    def restore(self, state: dict[str, Any], /) -> None:
        """Goes on where `state` was returned."""
        del state

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Makes sure that what was written is kept; returns what to save."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Begins, or fails before a step is taken."""

    @abc.abstractmethod
    def write(self, lines: Sequence[Line]) -> None:
        """Writes lines, in the order of their steps."""

    @abc.abstractmethod
    def end(self) -> None:
        """Ends: nothing else is to come."""


def _columns(name: str, x: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Returns `[steps]` as it is, and the columns of `[steps, N]` under names of their own."""
    return [(name, x)] if x.ndim == 1 else [(f"{name}/{i}", y) for i, y in enumerate(x.T)]
