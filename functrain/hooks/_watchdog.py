"""The end of a run that makes no progress, after the stacks of all threads."""

import contextlib
import faulthandler
import sys
import threading
import time
from typing import IO

from functrain.common import _repr
from functrain.common._checks import require, require_flags
from functrain.distributed._ending import exit_all
from functrain.engine._position import Position
from functrain.loop._events import Event, LogsReady


class Watchdog:
    """A hook that prints the stacks of all threads when no step ends for a number of seconds.

    The stacks show what a run waits for that seems to hang, such as a data loader or another
    process. They are printed once for each time that the run makes no progress. After the same time
    again, the process ends with status 1, and so do the others of the run, so that a supervisor
    such as ``python -m functrain.launch`` starts them again. Compilation counts as well, so
    `seconds` should be longer than the longest compilation, evaluation and save.

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
        is_number = isinstance(seconds, int | float) and 0 < seconds < threading.TIMEOUT_MAX
        require(is_number, "seconds", "a positive number", seconds)
        require_flags(exits=exits)
        if file is not None:
            try:
                file.fileno()
            except (AttributeError, OSError, ValueError) as error:
                raise ValueError(
                    f"file: expected an open file with a descriptor, got {file!r}. Pass one from "
                    "open(path, 'w')."
                ) from error
        self.seconds, self.exits, self._file = seconds, exits, file
        self._last: Position | None = None
        self._last_time = 0.0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return _repr.call(self, seconds=self.seconds)

    def begin(self) -> None:
        """Starts to watch."""
        self._last, self._last_time = None, time.monotonic()
        self._is_over.clear()
        self._thread = threading.Thread(target=self._watch, name="functrain-watchdog", daemon=True)
        self._thread.start()

    def logs(self, event: LogsReady, /) -> None:
        """Notes that steps have ended: their logs have arrived from the device."""
        self._note(event.position)

    def __call__(self, event: Event, /) -> None:
        """Notes progress other than that of steps, such as the end of an evaluation."""
        self._note(event.position)

    def close(self) -> None:
        """Ends the watch."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _note(self, position: Position) -> None:
        self._last, self._last_time = position, time.monotonic()

    def _watch(self) -> None:
        has_printed = False
        while not self._is_over.wait(min(1.0, self.seconds / 4)):
            idle_seconds = time.monotonic() - self._last_time
            if idle_seconds < self.seconds:
                has_printed = False
            elif not has_printed:
                # A full disk or a closed pipe does not end the watch.
                with contextlib.suppress(OSError, ValueError):
                    self._print_stacks()
                has_printed = True
            elif self.exits and idle_seconds > 2 * self.seconds:
                exit_all(f"ends, because no step has ended for {2 * self.seconds:g} seconds.")

    def _print_stacks(self) -> None:
        place = "its first step" if self._last is None else f"step {self._last.step}"
        # A notebook replaces sys.stderr by an object without a descriptor.
        file = self._file or sys.__stderr__
        if file is not None:
            since = "before" if self._last is None else "after"
            file.write(
                f"functrain.hooks.Watchdog: no step has ended for {self.seconds:g} seconds, "
                f"{since} {place}. The stacks of all threads:\n"
            )
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
