"""A progress bar in a terminal or notebook, plain lines elsewhere."""

import collections
import time
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeAlias

import jax
from rich.console import Console

from functrain.common._log_values import Unshown, format_value, to_values
from functrain.common._types import PyTree
from functrain.engine import _times
from functrain.engine._position import Position
from functrain.loop._events import ChunkEnd, EpochEnd, Event
from functrain.loop._resuming import Resumed
from functrain.trainer._bar import Bar, fill_lines
from functrain.trainer._recorder import Recorder

Verbose: TypeAlias = Literal["auto", "bar", "lines"] | int

# The bar is updated at most once in this time.
REFRESH_SECONDS = 0.2


class ProgressReport:
    """Shows the progress of a fit: steps, examples per second, logs, metrics, and time left.

    The time for compiling and evaluation does not count for the examples per second. In a
    terminal, the bar of an epoch becomes a line at its end.

    Args:
      epochs: The total number of epochs.
      steps_per_epoch: The number of steps per epoch, if known.
      verbose: ``"auto"`` shows a bar in a terminal or notebook and prints lines elsewhere;
        ``"bar"`` or 1, ``"lines"`` or 2 choose one of them.
      start: The position at which the fit starts or resumes.
      console: The console to write to; standard output by default.
      resumed: The checkpoint that the fit resumes from, if any, which is reported first.
      total_steps: The number of steps of a training that is not divided into epochs; else None.
    """

    def __init__(
        self,
        epochs: int,
        steps_per_epoch: int | None,
        verbose: Verbose = "auto",
        start: Position = Position(),  # noqa: B008  # a tuple, which is immutable
        console: Console | None = None,
        *,
        resumed: Resumed | None = None,
        total_steps: int | None = None,
    ) -> None:
        self._resumed = resumed
        self._console = console or Console()
        is_interactive = self._console.is_terminal or self._console.is_jupyter
        self._shows_bar = is_interactive if verbose == "auto" else verbose in ("bar", 1)
        self._epochs = epochs
        self._has_epochs = total_steps is None
        self._total = steps_per_epoch if total_steps is None else total_steps
        self._bar: Bar | None = None
        self._metrics: PyTree = {}
        self._refresh_time = 0.0
        self._seconds: _times.Seconds = collections.defaultdict(float)
        # A training that was continued with more steps may be in a later epoch.
        self._begin(start.epoch, start.batch if self._has_epochs else start.step)

    def __enter__(self) -> Self:
        """Reports the checkpoint that is resumed, and shows the bar, if any."""
        _times.ask(self._seconds)
        if self._resumed:
            self._print(self._resumed.describe(has_epochs=self._has_epochs))
        if self._shows_bar and not (self._resumed and self._resumed.finished):
            self._show()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the bar at the last step, also after an error."""
        _times.end(self._seconds)
        if self._bar is not None:
            self._bar.update(completed=self._steps)
            self._bar.stop()

    def __call__(self, event: Event, recorder: Recorder) -> None:
        """Shows the progress at an event."""
        if isinstance(event, ChunkEnd):
            self._update(event, recorder)
        elif isinstance(event, EpochEnd):
            self._finish_epoch(event)

    def _update(self, event: ChunkEnd, recorder: Recorder) -> None:
        self._steps += event.steps
        self._examples += event.steps * event.examples
        # Data without examples count one per step.
        if event.examples > 1:
            self._unit = "examples"
        now = time.perf_counter()
        if self._bar is not None and now - self._refresh_time > REFRESH_SECONDS:
            self._refresh_time = now
            # The metrics of the last refresh have been computed by now, so this does not wait.
            values = {**recorder.latest, **to_values(self._metrics)}
            # Of several processes only one has a bar, and all would have to compute and fetch them.
            self._metrics = event.metrics() if jax.process_count() == 1 else {}
            self._bar.update(completed=self._steps, values=self._text(values))

    def _finish_epoch(self, event: EpochEnd) -> None:
        """Shows the epoch's values, and begins the next epoch."""
        text = self._text(event.values)
        if self._bar is not None:
            # Now the number of steps is known, even for data without a length.
            self._bar.update(total=self._steps, completed=self._steps, values=text)
        line = f"{self._title}  {self._steps} steps  {text}"
        if self._bar is None or self._bar.remove():
            self._print(self._fit_to_console(line) if self._shows_bar else line)
        self._bar = None
        self._begin(event.epoch + 1)
        # The bar of the next epoch is shown at once, unless this epoch was the last.
        if self._shows_bar and event.epoch + 1 < self._epochs and not event.stopped:
            self._show()

    def _print(self, line: str) -> None:
        # Without soft_wrap, rich would break lines at the console's width, also in a log file.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _fit_to_console(self, line: str) -> str:
        """Returns a line as several that are as wide as the console; they break between values."""
        indent = len(self._title) + 2
        return "\n".join(fill_lines(line.split("  "), self._console.width, indent))

    def _begin(self, epoch: int, steps: int = 0) -> None:
        self._title = f"epoch {epoch + 1}/{self._epochs}" if self._has_epochs else "training"
        # The steps may include those before a checkpoint. The rate counts those of this process.
        self._steps, self._examples, self._unit = steps, 0, "steps"
        self._metrics = {}
        self._seconds.clear()
        self._start_time = self._refresh_time = time.perf_counter()

    def _show(self) -> None:
        self._bar = Bar(self._console, self._title, self._total, self._steps)

    def _text(self, values: Mapping[str, Any]) -> str:
        """Returns the rate and the values as a text."""
        others = self._seconds["compiling"] + self._seconds["evaluation"]
        seconds = max(time.perf_counter() - self._start_time - others, 1e-9)
        shown = {name: x for name, x in values.items() if not isinstance(name, Unshown)}
        texts = [f"{name} {format_value(value)}" for name, value in shown.items()]
        return "  ".join([f"{self._examples / seconds:,.0f} {self._unit}/s", *texts])
