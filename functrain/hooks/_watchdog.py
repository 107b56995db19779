"""The end of a run that makes no progress, with the stacks of all threads."""

import dataclasses
import faulthandler
import os
import sys
import threading
import time
from typing import Any, ClassVar

from functrain.common._checks import is_positive, require
from functrain.loop._events import ChunkEnd, Event

# A notebook replaces sys.stderr by an object without a descriptor.
_STDERR: Any = sys.__stderr__


@dataclasses.dataclass(eq=False)
class Watchdog:
    """A hook that prints stacks, then ends the process, when no step ends for some seconds.

    It prints the position of the run and the stacks of all threads to the standard error stream,
    which show what the run waits for, such as a data loader or another process. After the same time
    again, the process ends with status 124, so that a supervisor such as
    ``python -m functrain.launch`` ends the others of the run and starts all again. Compilation
    counts as well, so `seconds` should be longer than the longest compilation, evaluation and save.

    If other code than Python's holds the interpreter, a thread of C ends the process a tenth of the
    time later, with status 1.

    Args:
      seconds: The number of seconds.
      exits: False only prints.

    Raises:
      ValueError: `seconds` is not a positive number.

    Examples:
      >>> hooks = [Watchdog(1800)]  # for fit(hooks=...)
      >>> hooks[0]
      Watchdog(seconds=1800, exits=True)
    """

    seconds: float
    _: dataclasses.KW_ONLY
    exits: bool = True

    # That of `timeout` in a shell.
    STATUS: ClassVar[int] = 124

    def __post_init__(self) -> None:
        require(is_positive(self.seconds), "seconds", "a positive number", self.seconds)
        self._is_over = threading.Event()

    def begin(self) -> None:
        """Starts to watch."""
        self.close()
        self._position = "the start of the run"
        self._is_over = threading.Event()
        self._note_progress()
        threading.Thread(target=self._watch, args=(self._is_over,), daemon=True).start()

    def close(self) -> None:
        """Ends the watch."""
        self._is_over.set()
        faulthandler.cancel_dump_traceback_later()

    def logs(self, event: ChunkEnd, /) -> None:
        """Notes that steps have ended: their logs have arrived from the device."""
        self(event)

    def __call__(self, event: Event, /) -> None:
        """Notes progress other than that of steps, such as the end of an evaluation."""
        self._position = f"step {event.step:,}, epoch {event.epoch + 1}"
        # Each start makes a thread, which takes longer than a short step.
        if time.monotonic() - self._progress_time > self.seconds / 20:
            self._note_progress()

    def _note_progress(self) -> None:
        self._progress_time = time.monotonic()
        if self.exits:
            # A thread of C, which code that holds the interpreter cannot delay.
            faulthandler.dump_traceback_later(2.1 * self.seconds, exit=True, file=_STDERR)

    def _watch(self, is_over: threading.Event) -> None:
        """Prints, and ends the process, when the time has passed."""
        has_printed = False
        while not is_over.wait(self.seconds / 20):
            idle = time.monotonic() - self._progress_time
            if idle > self.seconds and not has_printed:
                self._print("no step has ended", self.seconds)
                faulthandler.dump_traceback(_STDERR)
            has_printed = idle > self.seconds
            if self.exits and idle > 2 * self.seconds:
                self._print("the process ends: no step has ended", 2 * self.seconds)
                # The workers of a data loader would go on. There are none without this module.
                if (processes := sys.modules.get("multiprocessing.process")) is not None:
                    for child in processes.active_children():
                        child.kill()
                os._exit(self.STATUS)

    def _print(self, problem: str, seconds: float) -> None:
        text = f"functrain.hooks.Watchdog: {problem} for {seconds:g} seconds, at {self._position}."
        print(text, file=_STDERR, flush=True)
