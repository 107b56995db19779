"""Values, pictures and texts for Weights & Biases."""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from functrain.common._library import import_optional
from functrain.hooks._logger import Line, Logger


class WandB(Logger):
    """A hook that logs to Weights & Biases, with wandb.

    Names are those of `functrain.hooks.TensorBoard`; wandb's step is the training step. The values
    of a step are exact, and are logged one program late.

    A run that a `functrain.Checkpointer` resumes continues the same wandb run. wandb keeps the
    values that a killed process had logged after its checkpoint, and ignores them when they are
    logged again; they are identical. Offline, each process writes a new folder with the same id.

    Args:
      every: The logs of every `every`-th step are logged, at about 0.1 ms each.
      **init: Arguments of ``wandb.init``: ``project="mnist", config={...}``.

    Raises:
      ValueError: `every` is not a positive integer.
      ImportError: wandb is not installed.

    Attributes:
      run: The wandb run while it is active, else None.

    Examples:
      >>> hooks = [WandB(project="mnist")]  # doctest: +SKIP
    """

    def __init__(self, *, every: int = 100, **init: Any) -> None:
        super().__init__(every)
        self.init = init
        hint = "Weights & Biases need their library: pip install 'functrain[wandb]'"
        self._wandb = import_optional("wandb", hint)
        self._id: str | None = None
        self.run: Any = None

    def begin(self) -> None:
        """Starts a wandb run, or resumes the one of the checkpoint."""
        if self.run is None:
            resumed = {} if self._id is None else {"id": self._id, "resume": "allow"}
            # The id of the checkpoint takes precedence over one of the user's.
            self.run = self._wandb.init(**{**self.init, **resumed})

    def write(self, lines: Sequence[Line]) -> None:
        """Logs lines."""
        self.begin()
        for line in lines:
            samples = {name: self._media(x) for name, x in line.samples.items()}
            self.run.log({**line.values, **samples}, step=line.step)

    def _media(self, sample: np.ndarray | str) -> Any:
        if isinstance(sample, str):
            # Not `inject`, which would add wandb's style sheet.
            return self._wandb.Html(f"<pre>{html.escape(sample)}</pre>", inject=False)
        return self._wandb.Image(sample)

    def state(self) -> dict[str, Any]:
        """Returns the id of the wandb run, for the checkpoint."""
        return {"id": None if self.run is None else self.run.id}

    def restore(self, state: dict[str, Any], /) -> None:
        """Makes the next run resume the wandb run with the saved id."""
        self._id = state["id"]

    def end(self) -> None:
        """Finishes the wandb run."""
        if self.run is not None:
            self.run.finish()
        self.run = self._id = None
