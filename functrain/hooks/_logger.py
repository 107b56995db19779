"""The base class of loggers, which write lines in order without waiting for the device."""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from functrain.common._checks import require_integer
from functrain.common._log_values import is_loggable, split_members
from functrain.common._warnings import warn
from functrain.loop._events import ChunkEnd, EpochEnd, Event


class Line(NamedTuple):
    """The values and samples to write for one step or epoch.

    Attributes:
      step: Steps taken since the training began.
      epoch: Number of the epoch.
      values: Numbers by name; those of a population's members are ``name/0``, ``name/1``, ...
      samples: Pictures `u8[H, W, C]` and texts by name.
    """

    step: int
    epoch: int
    values: dict[str, float]
    samples: dict[str, np.ndarray | str]


class Logger:
    """A hook that writes the logs of steps, one program late, and the values that hooks add.

    An error while writing does not end the run; the first one causes a warning.

    Args:
      steps: The logs of every `steps`-th step are written; for other steps, only the values that
        hooks have added. None writes the logs of the steps at which the logger is called.
    """

    # One process writes for all.
    only_first = True
    # The prefix of the values of an epoch, to keep them apart from those of its last step.
    epoch_prefix = "epoch/"
    # See `functrain.hooks.Hook`.
    resume_key = ""

    def __init__(self, steps: int | None) -> None:
        if steps is not None:
            require_integer("every", steps)
        self.steps = steps
        # Lines of values that hooks have added; the logs of their steps come one program later.
        self._pending_lines: list[Line] = []
        self._has_warned = False
        # The file that is open, if there is one.
        self.file: pathlib.Path | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.resume_key})"

    def __call__(self, event: Event, /) -> None:
        """Collects the values that hooks have added, and those of an epoch."""
        prefix = self.epoch_prefix if isinstance(event, EpochEnd) else ""
        # Other values cause an error in fit, but only after all hooks have been called.
        numbers = {n: x for n, x in event.values.items() if is_loggable(x, event._of_members)}
        values = {f"{prefix}{name}": x for name, x in split_members(numbers).items()}
        if values or event.samples or self.steps is None:
            self._pending_lines.append(Line(event.step, event.epoch, values, dict(event.samples)))
        # After other events, no logs of the same step can come.
        if not isinstance(event, ChunkEnd):
            self._write_pending()

    def logs(self, event: ChunkEnd, /) -> None:
        """Adds the logs of a chunk's steps to the pending lines, and writes them."""
        first = event.step - event.steps + 1
        logs = event.host_logs()
        lines: list[Line] = []
        if self.steps is None:
            # The last step, if the logger was called there.
            steps = range(event.step, event.step + 1) if self._pending_lines else range(0)
        else:
            steps = range(first + -first % self.steps, event.step + 1, self.steps)
        for step in steps if logs else ():
            step_logs = {name: x[step - first] for name, x in logs.items()}
            lines.append(Line(step, event.epoch, split_members(step_logs), {}))
        # Hooks add values at the end of a chunk: a pending line belongs to the chunk's last step,
        # and becomes one line with the logs of that step.
        for line in self._pending_lines:
            if lines and lines[-1].step == line.step:
                line = line._replace(values={**lines.pop().values, **line.values})
            lines.append(line)
        self._pending_lines = lines
        self._write_pending()

    def _write_pending(self) -> None:
        lines, self._pending_lines = self._pending_lines, []
        if lines:
            with self._warn_of_errors():
                if self.file is not None and not self.file.exists():
                    warn(f"{self.file}: the file of this log was removed during the run.")
                    self.end()
                self.write(lines)

    def close(self) -> None:
        """Writes the remaining lines, and closes the log."""
        self._write_pending()
        with self._warn_of_errors():
            self.end()

    @contextlib.contextmanager
    def _warn_of_errors(self) -> Iterator[None]:
        """Context manager: suppresses errors and warns of the first one."""
        # A full disk must not end a training run.
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"{self!r} could not write: {type(error).__name__}: {error}. The training "
                    "continues; lines of this log are missing from here on.",
                )

    def begin(self) -> None:
        """Opens the log; an error here ends the run before its first step."""

    def write(self, lines: Sequence[Line]) -> None:
        """Writes lines, in the order of their steps."""
        raise NotImplementedError

    def end(self) -> None:
        """Closes the log after the last line."""

    def state(self) -> dict[str, Any]:
        """Flushes the log to disk; returns its position, for the checkpoint."""
        return {}

    def restore(self, state: dict[str, Any], /) -> None:
        """Continues the log from the position that `state` returned."""
