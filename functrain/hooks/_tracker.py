"""The base class of loggers that continue a run of an experiment tracker."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from functrain.hooks._logger import Line, Logger


class Tracker(Logger):
    """A hook that logs to an experiment tracker: the base class of `WandB`, `MLflow` and others.

    A subclass for another tracker has three methods. `start` begins a run, or continues one,
    `log` logs what belongs to one step, and `finish` ends the run. Names are those of
    `functrain.hooks.TensorBoard`: ``loss`` is a value of a step, ``epoch/loss`` one of an epoch.
    The values of a step are exact, and are logged one program late, so that the loop does not wait
    for the device. In several processes, only the first one logs.

    The id of the run is in the checkpoint, and a run that a `functrain.Checkpointer` resumes
    continues the same run of the tracker. A killed process may have logged steps after its
    checkpoint. The resumed run takes these steps again, with the same values, and logs only what
    the tracker does not have yet: of each name, the steps after the last one that `start` returned.

    A checkpoint must not be ahead of the tracker: what was logged before it is not logged again. If
    `log` returns before the tracker has the values, override `flush`, too.

    Args:
      every: The logs of every `every`-th step are logged.

    Raises:
      ValueError: `every` is not a positive integer.

    Attributes:
      run_id: The id of the run in the tracker; None before the start and after the end.
      run: For the tracker's own object of the run. It is set to None at the end.

    Examples:
      >>> import functrain as ft
      >>> class Memory(ft.hooks.Tracker):
      ...     runs = {}
      ...     def start(self, run_id):
      ...         run_id = run_id or f"run-{len(self.runs)}"
      ...         rows = self.runs.setdefault(run_id, [])
      ...         return run_id, {name: step for step, values in rows for name in values}
      ...     def log(self, step, values, samples):
      ...         self.runs[self.run_id].append((step, values))
      ...     def finish(self):
      ...         print("finished")
      >>> memory = Memory(every=1)
      >>> position = ft.Position(step=10)
      >>> event = ft.events.EpochEnd(position=position, state=(), values={"loss": 0.5})
      >>> memory.begin()
      >>> memory(event)
      >>> memory.close()
      finished
      >>> memory.runs
      {'run-0': [(10, {'epoch/loss': 0.5})]}
    """

    def __init__(self, *, every: int = 100) -> None:
        super().__init__(every)
        self.run_id: str | None = None
        self.run: Any = None
        self._is_active = False
        # The last step of each name that the tracker had when it was started.
        self._last_steps: dict[str, int] = {}

    def start(self, run_id: str | None) -> tuple[str, Mapping[str, int]]:
        """Starts a run, or continues one.

        It is called before the first step, and after a `pause` with the next line. An error in the
        first call ends the training, later ones cause a warning.

        Args:
          run_id: The id of the run to continue; None for a new run.

        Returns:
          The id of the run, and the last step that the tracker has for each name: an empty dict for
          a new run, after a `pause`, or for a tracker that ignores the steps that it already has.
        """
        raise NotImplementedError

    def log(
        self, step: int, values: dict[str, float], samples: dict[str, np.ndarray | str]
    ) -> None:
        """Logs what belongs to a step; a step can have several calls, with different names.

        Args:
          step: Steps taken since the training began.
          values: Numbers by name. Some may be NaN or infinite.
          samples: Pictures `u8[H, W, C]` and texts by name.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Ends the run, and waits until the tracker has all of it."""
        raise NotImplementedError

    def flush(self) -> None:
        """Waits until the tracker has all that was logged. It is called before each checkpoint.

        It does nothing by default: `log` waits. Another way is ``self.pause()``.
        """

    def pause(self) -> None:
        """Finishes the run, until the next line continues it with `start`."""
        if self._is_active:
            self._is_active = False
            self.finish()

    def begin(self) -> None:
        """Starts a run, or continues the one of the checkpoint, unless it is active."""
        if not self._is_active:
            self.run_id, last_steps = self.start(self.run_id)
            # Those of the first start stay: a pause may come before the run has passed them.
            self._last_steps |= last_steps
            self._is_active = True

    def write(self, lines: Sequence[Line]) -> None:
        """Logs the parts of lines that the tracker does not have."""
        self.begin()
        for line in lines:
            values = self._without_old(line.values, line.step)
            samples = self._without_old(line.samples, line.step)
            if values or samples:
                self.log(line.step, values, samples)

    def _without_old(self, named: dict[str, Any], step: int) -> dict[str, Any]:
        return {name: x for name, x in named.items() if step > self._last_steps.get(name, -1)}

    def state(self) -> dict[str, Any]:
        """Waits until the tracker has all; returns the id of the run, for the checkpoint."""
        with self._warn_of_errors():
            self.flush()
        return {"id": self.run_id}

    def restore(self, state: dict[str, Any], /) -> None:
        """Makes the next `start` continue the run of the checkpoint."""
        self.run_id = state["id"]

    def end(self) -> None:
        """Finishes the run."""
        try:
            self.pause()
        finally:
            self.run = self.run_id = None
            self._last_steps = {}
