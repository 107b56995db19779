"""A trace of some steps."""

import dataclasses
import os

import jax

from functrain.common._checks import require_integer
from functrain.common._paths import PathArg, absolute_path
from functrain.engine._trigger import at
from functrain.loop._events import Event


@dataclasses.dataclass(eq=False)
class Profile:
    """A hook that traces some steps with JAX's profiler.

    Programs end where the trace begins and ends, so that it contains exactly these steps. The hook
    waits for the device at both places. TensorBoard's profile plugin, XProf and
    ``jax.profiler.ProfileData`` read the trace.

    Args:
      directory: The directory for the trace, which is written to `plugins/profile` within it.
      start: The step after which the trace begins. Compilation is over after the first program.
      steps: The number of steps to trace.

    Raises:
      ValueError: `start` or `steps` is not a positive integer.

    Examples:
      >>> hooks = [Profile("profile", start=200, steps=50)]
      >>> hooks[0].every
      at(200, 250)
    """

    directory: PathArg
    _: dataclasses.KW_ONLY
    start: int = 100
    steps: int = 20

    def __post_init__(self) -> None:
        require_integer("start", self.start)
        require_integer("steps", self.steps)
        # The process may change its working directory during the run.
        self.directory = absolute_path(self.directory, "directory")
        # A trigger also ends the chunk at its steps, so that no program is traced in part.
        self.every = at(self.start, self.start + self.steps)
        self._is_tracing = False

    def begin(self) -> None:
        """Creates the directory: an unsuitable path fails before the first step."""
        os.makedirs(self.directory, exist_ok=True)

    def __call__(self, event: Event, /) -> None:
        """Begins or ends the trace."""
        # Programs are dispatched asynchronously: earlier steps must not run into the trace, and the
        # last traced step must be over.
        jax.block_until_ready(event.state)
        if event.step == self.start:
            jax.profiler.start_trace(self.directory)
            self._is_tracing = True
        else:
            self.close()

    def close(self) -> None:
        """Ends the trace if it is still active, because the run ended or failed within it."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
