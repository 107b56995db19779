"""A trace of some steps."""

import os
import pathlib

import jax

from functrain.common import _repr
from functrain.common._checks import require_integer
from functrain.engine._trigger import at
from functrain.loop._events import Event


class Profile:
    """A hook that traces some steps with JAX's profiler.

    Programs end where the trace begins and ends, so that it holds these steps and no others; the
    device is waited for at both places. TensorBoard's profile plugin, XProf and
    ``jax.profiler.ProfileData`` read what it writes.

    Args:
      directory: Where to write, in `plugins/profile`.
      start: After which step it begins. Compiling is over after the first program.
      steps: How many steps to trace.

    Raises:
      ValueError: `start` or `steps` is no whole number from 1 on.

    Examples:
      >>> hooks = [Profile("profile", start=200, steps=50)]
      >>> hooks[0].every
      at(200, 250)
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, start: int = 100, steps: int = 20
    ) -> None:
        require_integer("start", start)
        require_integer("steps", steps)
        self.directory = pathlib.Path(directory)
        self.start, self.steps = start, steps
        self.every = at(start, start + steps)
        self._is_tracing = False

    def __repr__(self) -> str:
        return _repr.call(self, directory=str(self.directory), start=self.start, steps=self.steps)

    def __call__(self, event: Event, /) -> None:
        """Begins or ends the trace."""
        jax.block_until_ready(event.state)
        if event.step == self.start:
            jax.profiler.start_trace(self.directory)
            self._is_tracing = True
        else:
            self.close()

    def close(self) -> None:
        """Ends the trace, if it is under way: of a run that is over, or that failed."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
