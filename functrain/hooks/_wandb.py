"""Values, pictures and texts for Weights & Biases."""

import glob
import html
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from functrain.common._library import import_optional
from functrain.hooks._tracker import Tracker


class WandB(Tracker):
    """A hook that logs to Weights & Biases, with wandb.

    Names are those of `functrain.hooks.TensorBoard`; wandb's step is the training step. The values
    of a step are exact, and are logged one program late.

    A run that a `functrain.Checkpointer` resumes continues the same wandb run. Online, wandb
    ignores the steps that a killed process had logged after its checkpoint when they are logged
    again; they are identical. What it had not sent yet when the process was killed is missing.

    Offline, wandb drops the last 32 KiB if the process is killed. A checkpoint therefore finishes
    the run in its folder, in milliseconds, and the next line continues it in a new folder with the
    same id, in a fifth of a second. If the process was killed, the folder that was begun after the
    checkpoint gets the prefix ``killed-``. The others, which ``wandb sync`` uploads in their order,
    have each step once.

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
        super().__init__(every=every)
        self.init = init
        hint = "Weights & Biases need their library: pip install 'functrain[wandb]'"
        self._wandb = import_optional("wandb", hint)
        # The names of the offline folders that the checkpoint has.
        self._saved_folders: list[str] = []

    def start(self, run_id: str | None) -> tuple[str, Mapping[str, int]]:
        """Starts a wandb run, or resumes the one with an id."""
        is_resumed = self.run is None and run_id is not None
        # The id of the checkpoint takes precedence over one of the user's.
        resumed: dict[str, Any] = {} if run_id is None else {"id": run_id, "resume": "allow"}
        settings = self.init.get("settings") or {}
        if self.run is not None and isinstance(settings, dict):
            # After a pause, within the progress of the run.
            resumed["settings"] = {**settings, "silent": True}
        self.run = self._wandb.init(**{**self.init, **resumed})
        if is_resumed:
            self._put_aside_later_folders()
        return self.run.id, {}

    def _put_aside_later_folders(self) -> None:
        """Renames the folders of the run that were begun after the checkpoint."""
        kept_names = {*self._saved_folders, pathlib.Path(self.run.dir).parent.name}
        for folder in self._offline_folders():
            if folder.name not in kept_names:
                new_path = folder.with_name(f"killed-{folder.name}")
                # Names have whole seconds of a clock that may be set back, so they can repeat.
                while new_path.exists():
                    new_path = new_path.with_name(f"killed-{new_path.name}")
                folder.rename(new_path)

    def _offline_folders(self) -> list[pathlib.Path]:
        """Returns the folders that wandb has written offline for the run."""
        if self.run is None:
            return []
        # Not by the folder's name: another id may begin with this one.
        pattern = f"offline-run-*/run-{glob.escape(self.run.id)}.wandb"
        return [path.parent for path in pathlib.Path(self.run.dir).parents[1].glob(pattern)]

    def log(
        self, step: int, values: dict[str, float], samples: dict[str, np.ndarray | str]
    ) -> None:
        """Logs what belongs to a step."""
        self.run.log({**values, **{name: self._media(x) for name, x in samples.items()}}, step=step)

    def _media(self, sample: np.ndarray | str) -> Any:
        if isinstance(sample, str):
            # Not `inject`, which would add wandb's style sheet.
            return self._wandb.Html(f"<pre>{html.escape(sample)}</pre>", inject=False)
        return self._wandb.Image(sample)

    def flush(self) -> None:
        """Pauses the run if it is offline: wandb has no other way to write what is logged."""
        if self.run is not None and self.run.offline:
            self.pause()

    def finish(self) -> None:
        """Finishes the wandb run."""
        self.run.finish()

    def state(self) -> dict[str, Any]:
        """Returns the id of the wandb run, and the names of its offline folders so far."""
        state = super().state()
        return {**state, "folders": sorted(folder.name for folder in self._offline_folders())}

    def restore(self, state: dict[str, Any], /) -> None:
        """Makes the next `start` continue the wandb run, and put later folders of it aside."""
        super().restore(state)
        self._saved_folders = state["folders"]
