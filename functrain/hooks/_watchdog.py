"""The end of a run that makes no progress, with the stacks of all threads."""

import dataclasses
import faulthandler
import sys
import threading
import time
from typing import Any

from functrain.common._checks import is_positive, require
from functrain.loop._events import ChunkEnd, Event

# A notebook replaces sys.stderr by an object without a descriptor.
_STDERR: Any = sys.__stderr__


@dataclasses.dataclass(eq=False)
class Watchdog:
    """A hook that prints stacks, then ends the process, when no step ends for some seconds.

    It prints the stacks of all threads to the standard error stream, which show what the run waits
    for, such as a data loader or another process. After the same time again, the process ends with
    status 1, so that a supervisor such as ``python -m functrain.launch`` ends the others of the run
    and starts all again. Compilation counts as well, so `seconds` should be longer than the longest
    compilation, evaluation and save.

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

    def __post_init__(self) -> None:
        require(is_positive(self.seconds), "seconds", "a positive number", self.seconds)
        self._printing: threading.Timer | None = None

    def begin(self) -> None:
        """Starts the timers."""
        self.close()
        self._start_time = time.monotonic()
        self._printing = threading.Timer(self.seconds, self._print_stacks)
        self._printing.daemon = True
        self._printing.start()
        if self.exits:
            # A thread of C, which Python code that holds the interpreter cannot delay.
            faulthandler.dump_traceback_later(2 * self.seconds, exit=True, file=_STDERR)

    def close(self) -> None:
        """Ends the timers."""
        if self._printing is not None:
            self._printing.cancel()
        faulthandler.cancel_dump_traceback_later()

    def logs(self, event: ChunkEnd, /) -> None:
        """Notes that steps have ended: their logs have arrived from the device."""
        self(event)

    def __call__(self, event: Event, /) -> None:
        """Notes progress other than that of steps, such as the end of an evaluation."""
        # Each start makes threads, which takes longer than a short step.
        if time.monotonic() - self._start_time > self.seconds / 20:
            self.begin()

    def _print_stacks(self) -> None:
        text = f"functrain.hooks.Watchdog: no step has ended for {self.seconds:g} seconds."
        print(text, file=_STDERR, flush=True)
        faulthandler.dump_traceback(_STDERR)
