"""The end of a run that makes no progress, after the stacks of all threads."""

import faulthandler
import os
import sys
import threading
import time
from typing import IO, Any

from functrain.common import _repr
from functrain.common._checks import is_positive, require
from functrain.loop._events import ChunkEnd, Event


class Watchdog:
    """A hook that prints the stacks of all threads when no step ends for a number of seconds.

    The stacks show what a run waits for that seems to hang, such as a data loader or another
    process. They are printed once for each time that the run makes no progress. After the same time
    again, the process ends with status 1, so that a supervisor such as ``python -m
    functrain.launch`` ends the others of the run and starts all again. Compilation counts as well,
    so `seconds` should be longer than the longest compilation, evaluation and save.

    Args:
      seconds: The number of seconds.
      exits: False only prints, and the run goes on.
      file: A file that has a descriptor. The standard error stream by default.

    Raises:
      ValueError: `seconds` is not a positive number, `exits` is not a bool, or `file` has no
        descriptor.

    Examples:
      >>> hooks = [Watchdog(600)]  # for fit(hooks=...)
      >>> hooks[0]
      Watchdog(seconds=600)
    """

    def __init__(self, seconds: float, *, exits: bool = True, file: IO[str] | None = None) -> None:
        require(is_positive(seconds), "seconds", "a positive number", seconds)
        if file is not None:
            file.fileno()
        self.seconds, self.exits, self._file = seconds, exits, file
        self._start_time = 0.0
        self._timer: threading.Timer | None = None

    def __repr__(self) -> str:
        return _repr.call(self, seconds=self.seconds)

    def begin(self) -> None:
        """Starts the timers."""
        self._start_time = time.monotonic()
        # A thread of C prints, so that Python code that holds the interpreter cannot delay it. A
        # notebook replaces sys.stderr by an object without a descriptor.
        file: Any = self._file or sys.__stderr__
        faulthandler.dump_traceback_later(self.seconds, file=file)
        if self.exits:
            self._timer = threading.Timer(2 * self.seconds, self._exit)
            self._timer.name, self._timer.daemon = "functrain-watchdog", True
            self._timer.start()

    def close(self) -> None:
        """Ends the timers."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None

    def logs(self, event: ChunkEnd, /) -> None:
        """Notes that steps have ended: their logs have arrived from the device."""
        self._restart()

    def __call__(self, event: Event, /) -> None:
        """Notes progress other than that of steps, such as the end of an evaluation."""
        self._restart()

    def _restart(self) -> None:
        # Each start makes two threads, which takes longer than a short step.
        if time.monotonic() - self._start_time > self.seconds / 20:
            self.close()
            self.begin()

    def _exit(self) -> None:
        print(
            f"functrain.hooks.Watchdog: no step has ended for {2 * self.seconds:g} seconds. The "
            "process ends with status 1.",
            file=sys.__stderr__,
            flush=True,
        )
        os._exit(1)
