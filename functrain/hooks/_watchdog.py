"""The end of a run that makes no progress, with the stacks of all threads."""

import dataclasses
import faulthandler
import sys
import time
from typing import Any

from functrain.common._checks import is_positive, require
from functrain.loop._events import ChunkEnd, Event


@dataclasses.dataclass(eq=False)
class Watchdog:
    """A hook that ends the process when no step has ended for a number of seconds.

    It prints the stacks of all threads to the standard error stream, which show what the run waits
    for, such as a data loader or another process. The process ends with status 1, so that a
    supervisor such as ``python -m functrain.launch`` ends the others of the run and starts all
    again. Compilation counts as well, so `seconds` should be longer than the longest compilation,
    evaluation and save.

    Args:
      seconds: The number of seconds.
      exits: False only prints, and the run goes on.

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

    def begin(self) -> None:
        """Starts the timer."""
        self._start_time = time.monotonic()
        # A thread of C, so that Python code that holds the interpreter cannot delay it. A notebook
        # replaces sys.stderr by an object without a descriptor.
        file: Any = sys.__stderr__
        faulthandler.dump_traceback_later(self.seconds, exit=self.exits, file=file)

    def close(self) -> None:
        """Ends the timer."""
        faulthandler.cancel_dump_traceback_later()

    def logs(self, event: ChunkEnd, /) -> None:
        """Notes that steps have ended: their logs have arrived from the device."""
        self(event)

    def __call__(self, event: Event, /) -> None:
        """Notes progress other than that of steps, such as the end of an evaluation."""
        # Each start makes a thread, which takes longer than a short step.
        if time.monotonic() - self._start_time > self.seconds / 20:
            self.begin()
