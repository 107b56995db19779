"""Values, pictures and texts for Weights & Biases."""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from functrain.common._library import import_optional
from functrain.hooks._logger import Line, Logger


class WandB(Logger):
    """A hook that logs to Weights & Biases, with wandb.

    Names are those of `functrain.hooks.TensorBoard`; wandb's step is that of the training. The
    numbers of a step are those of that very step, and come one program late.

    A run that a `functrain.Checkpointer` resumes goes on in the same run of wandb. That keeps what
    a process that was killed had logged after its checkpoint, and does not take it twice: it is
    the same. Offline each process writes a folder of its own, all under one id.

    Args:
      every: Log what every so many steps report, at some 0.1 ms each.
      **init: For ``wandb.init``: ``project="mnist", config={...}``.

    Raises:
      ValueError: `every` is no whole number from 1 on.
      ImportError: wandb is not installed.

    Attributes:
      run: wandb's run, while it is under way.

    Examples:
      >>> hooks = [WandB(project="mnist")]  # doctest: +SKIP
    """

    def __init__(self, *, every: int = 100, **init: Any) -> None:
        names = {name: init[name] for name in ("project", "name") if name in init}
        super().__init__(every, **names, every=every)
        self.init = init
        self._wandb = import_optional(
            "wandb", "Weights & Biases need their library: pip install 'functrain[wandb]'"
        )
        self._id: str | None = None
        self.run: Any = None

    def begin(self) -> None:
        """Begins a run of wandb, or goes on with the one of the checkpoint."""
        if self.run is None:
            same = {} if self._id is None else {"id": self._id, "resume": "allow"}
            self.run = self._wandb.init(**{**self.init, **same})

    def write(self, lines: Sequence[Line]) -> None:
        """Logs lines."""
        self.begin()
        for line in lines:
            samples = {name: self._media(x) for name, x in line.samples.items()}
            self.run.log({**line.values, **samples}, step=line.step)

    def _media(self, sample: np.ndarray | str) -> Any:
        if isinstance(sample, str):
            return self._wandb.Html(f"<pre>{html.escape(sample)}</pre>", inject=False)
        return self._wandb.Image(sample)

    def state(self) -> dict[str, Any]:
        """Returns the id of wandb's run, to be saved."""
        return {"id": None if self.run is None else self.run.id}

    def restore(self, state: dict[str, Any], /) -> None:
        """Has the next run go on with the one whose id was saved."""
        self._id = state["id"]

    def end(self) -> None:
        """Ends the run of wandb."""
        if self.run is not None:
            self.run.finish()
        self.run = self._id = None
