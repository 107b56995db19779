"""Values, pictures and texts for Trackio."""

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from functrain.common._library import import_optional
from functrain.hooks._tracker import Tracker


class Trackio(Tracker):
    """A hook that logs to Trackio.

    Names are those of `functrain.hooks.TensorBoard`; Trackio's step is the training step. The
    values of a step are exact, and are logged one program late.

    A run that a `functrain.Checkpointer` resumes continues the same Trackio run. Trackio writes
    twice a second, and so a checkpoint finishes its run, which waits for what was logged, and the
    next line continues it. In Trackio's local storage no step is missing or repeated. In a Space or
    on a server, the steps that a killed process had logged after its checkpoint appear twice.

    Args:
      every: The logs of every `every`-th step are logged.
      **init: Arguments of ``trackio.init``: ``project="mnist", config={...}``. A project is needed.

    Raises:
      ValueError: `every` is not a positive integer.
      ImportError: Trackio is not installed.

    Attributes:
      run: The Trackio run while it is active, else None.

    Examples:
      >>> hooks = [Trackio(project="mnist")]  # doctest: +SKIP
    """

    def __init__(self, *, every: int = 100, **init: Any) -> None:
        super().__init__(every=every)
        self.init = init
        hint = "Trackio needs its library: pip install 'functrain[trackio]'"
        self._trackio = import_optional("trackio", hint)

    def start(self, run_id: str | None) -> tuple[str, Mapping[str, int]]:
        """Starts a Trackio run, or continues the one with a name."""
        is_restart = self.run is not None
        resumed = {} if run_id is None else {"name": run_id, "resume": "allow"}
        with _without_output() if is_restart else contextlib.nullcontext():
            self.run = self._trackio.init(**{**self.init, **resumed})
        # After a pause, the storage has nothing new but what this process has logged.
        return self.run.name, {} if is_restart else self._last_steps_stored()

    def _last_steps_stored(self) -> dict[str, int]:
        storage = self._trackio.SQLiteStorage
        rows = storage.get_logs(self.run.project, self.run.name, run_id=self.run.id)
        last_steps: dict[str, int] = {}
        for row in rows:
            last_steps |= {name: max(row["step"], last_steps.get(name, -1)) for name in row}
        return last_steps

    def log(
        self, step: int, values: dict[str, float], samples: dict[str, np.ndarray | str]
    ) -> None:
        """Logs what belongs to a step; Trackio writes it later."""
        media = {name: self._media(x) for name, x in samples.items()}
        self.run.log({**values, **media}, step=step)

    def _media(self, sample: np.ndarray | str) -> Any:
        if isinstance(sample, str):
            return self._trackio.Markdown(f"```\n{sample}\n```")
        # Trackio takes three or four channels.
        channels = 3 if sample.shape[-1] == 1 else sample.shape[-1]
        return self._trackio.Image(np.broadcast_to(sample, (*sample.shape[:2], channels)))

    def flush(self) -> None:
        """Pauses the run: Trackio has no other way to wait."""
        self.pause()

    def finish(self) -> None:
        """Finishes the Trackio run, and waits until it is written."""
        with _without_output():
            self.run.finish()


def _without_output() -> contextlib.AbstractContextManager[Any]:
    """Context manager: drops what Trackio prints at each pause, within the progress of a run."""
    return contextlib.redirect_stdout(io.StringIO())
