"""A progress bar in a terminal or notebook, plain lines elsewhere."""

import math
import time
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeAlias

from rich.console import Console

from functrain.common._checks import require_one_of
from functrain.common._types import PyTree
from functrain.common._values import format_value, to_values
from functrain.engine._position import Position
from functrain.loop._events import ChunkEnd, EpochEnd, Event
from functrain.loop._saving import Resumed
from functrain.step._metered import SUM_OF_WEIGHTS
from functrain.trainer._bar import Bar
from functrain.trainer._recorder import Recorder

Verbose: TypeAlias = Literal["auto", "bar", "lines"] | int

REFRESH_SECONDS = 0.2
NOTICEABLE_SECONDS = 1.0


class ProgressReport:
    """Shows how far a fit is: steps, examples per second, losses, metrics, rate, time left.

    Args:
      epochs: How many there are in the whole training.
      steps_per_epoch: If known.
      verbose: ``"auto"`` takes the bar in a terminal or notebook and lines elsewhere; ``"bar"``
        or 1, ``"lines"`` or 2, and 0 for silence choose.
      start: Where the training begins or goes on.
      console: Where to write; standard output by default.
      resumed: Where it goes on, if it does: that is said first.
    """

    def __init__(
        self,
        epochs: int,
        steps_per_epoch: int | None,
        verbose: Verbose = "auto",
        start: Position = Position(),  # noqa: B008  # a tuple
        console: Console | None = None,
        *,
        resumed: Resumed | None = None,
    ) -> None:
        self._resumed = resumed
        self._console = console or Console()
        self._style = _style(verbose, self._console)
        self._epochs = epochs
        self._total = steps_per_epoch
        self._bar: Bar | None = None
        self._compiled = False  # whether that was said
        self._metrics: PyTree = {}
        self._shown = 0.0
        self._begin(start.epoch, start.batch)

    def __enter__(self) -> Self:
        """Says where the run goes on, and shows the bar, where there is one."""
        if self._resumed and self._style != "none":
            self._print(self._resumed.said())
        if self._style == "bar" and not (self._resumed and self._resumed.finished):
            self._show()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the bar where the run has come to, whatever happened."""
        if self._bar is not None:
            self._bar.update(completed=self._steps)
            self._bar.stop()

    def __call__(self, event: Event, recorder: Recorder) -> None:
        """Shows where the run is."""
        self._say_how_long_compiling_took(recorder)
        if isinstance(event, ChunkEnd):
            self._chunk(event, recorder)
        elif isinstance(event, EpochEnd):
            self._epoch(event)

    def _chunk(self, event: ChunkEnd, recorder: Recorder) -> None:
        self._steps += event.steps
        self._seen += event.steps * event.examples
        now = time.perf_counter()
        if self._bar is not None and now - self._shown > REFRESH_SECONDS:
            self._shown = now
            # The metrics asked for at the last refresh are there by now: no waiting.
            values = {**recorder.latest, **to_values(self._metrics)}
            values.pop(SUM_OF_WEIGHTS, None)
            self._metrics = event.metrics()
            self._bar.update(completed=self._steps, values=self._texts(values))

    def _say_how_long_compiling_took(self, recorder: Recorder) -> None:
        seconds = recorder.first_steps_seconds
        if self._style == "lines" and not self._compiled and not math.isnan(seconds):
            self._compiled = True
            if seconds >= NOTICEABLE_SECONDS:
                self._print(f"first steps after {seconds:.1f} s, compiling included")

    def _epoch(self, event: EpochEnd) -> None:
        """Leaves the epoch's values on the screen and begins the next."""
        texts = self._texts(event.values)
        if self._bar is not None:
            self._bar.update(total=self._steps, completed=self._steps, values=texts)
            self._bar.stop()
            self._bar = None
        elif self._style == "lines":
            self._print("  ".join([self._title, f"{self._steps} steps", *texts]))
        self._begin(event.epoch + 1)
        if self._style == "bar" and event.epoch + 1 < self._epochs and not event.stopped:
            self._show()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _begin(self, epoch: int, steps: int = 0) -> None:
        self._title = f"epoch {epoch + 1}/{self._epochs}"
        self._steps, self._seen = steps, 0  # steps taken, and examples of them in this process
        self._metrics = {}
        self._began = self._shown = time.perf_counter()

    def _show(self) -> None:
        self._bar = Bar(self._console, self._title, self._total, self._steps)

    def _texts(self, values: Mapping[str, Any]) -> list[str]:
        rate = f"{self._seen / max(time.perf_counter() - self._began, 1e-9):,.0f} examples/s"
        return [rate, *(f"{name} {format_value(value)}" for name, value in values.items())]


def _style(verbose: Verbose, console: Console) -> str:
    require_one_of("verbose", verbose, ("auto", "bar", "lines", 0, 1, 2))
    if verbose == "auto":
        return "bar" if console.is_terminal or console.is_jupyter else "lines"
    return verbose if isinstance(verbose, str) else ("none", "bar", "lines")[verbose]
