"""Values, pictures and texts for Comet."""

import contextlib
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from functrain.common._library import import_optional
from functrain.hooks._tracker import Tracker

_EMPTY_ARCHIVE_BYTES = 22  # a zip file without members


class Comet(Tracker):
    """A hook that logs to Comet, with comet_ml.

    Names are those of `functrain.hooks.TensorBoard`; Comet's step is the training step. The values
    of a step are exact, and are logged one program late.

    A run that a `functrain.Checkpointer` resumes continues the same experiment. Online, a
    checkpoint waits until Comet has all values. Of the pictures and texts that a killed process had
    logged after its checkpoint, Comet gets two.

    Offline, Comet writes the archive of an experiment when it ends, and none if the process is
    killed. A checkpoint therefore ends an archive, in about a second, and the next line begins
    another one for the same experiment. Their names end with their numbers, as in
    ``<key>-00012.zip``. An archive that a killed process wrote after its checkpoint gets the prefix
    ``killed-``. The others have each step once; upload them with ``comet upload <key>-*.zip``.

    Args:
      every: The logs of every `every`-th step are logged.
      **start: Arguments of ``comet_ml.start``: ``project_name="mnist", online=False``.

    Raises:
      ValueError: `every` is not a positive integer.
      ImportError: comet_ml is not installed.

    Attributes:
      run: Comet's experiment while it is active, else None. Offline, each archive has its own.

    Examples:
      >>> hooks = [Comet(project_name="mnist", online=False)]  # doctest: +SKIP
    """

    def __init__(self, *, every: int = 100, **start: Any) -> None:
        super().__init__(every=every)
        self.start_arguments = start
        hint = "Comet needs its library: pip install 'functrain[comet]'"
        self._comet = import_optional("comet_ml", hint)
        # The number of archives that were finished.
        self._archive_count = 0

    def start(self, run_id: str | None) -> tuple[str, Mapping[str, int]]:
        """Starts an experiment, or continues the one with a key."""
        # In this mode, archives may be uploaded in any order.
        arguments = {"mode": "get_or_create", **self.start_arguments}
        if run_id is not None:
            arguments |= {"mode": "get_or_create", "experiment_key": run_id}
        is_first = self.run is None
        # The others are within the progress of the run.
        with contextlib.nullcontext() if is_first else _without_messages():
            self.run = self._comet.start(**arguments)
        key = self.run.get_key()
        if not self._is_offline():
            return key, self._last_steps_at_comet(key)
        if is_first:
            self._take_over_archives(key, is_resumed=run_id is not None)
        return key, {}

    def _is_offline(self) -> bool:
        return isinstance(self.run, self._comet.OfflineExperiment)

    def _last_steps_at_comet(self, key: str) -> dict[str, int]:
        summary = self._comet.APIExperiment(previous_experiment=key).get_metrics_summary()
        steps = {metric["name"]: metric["stepCurrent"] for metric in summary or []}
        return {name: step for name, step in steps.items() if step is not None}

    def log(
        self, step: int, values: dict[str, float], samples: dict[str, np.ndarray | str]
    ) -> None:
        """Logs what belongs to a step; Comet sends or writes it later."""
        self.run.log_metrics(values, step=step)
        for name, sample in samples.items():
            if isinstance(sample, str):
                self.run.log_text(sample, step=step, metadata={"name": name})
            else:
                self.run.log_image(sample, name=name, step=step)

    def flush(self) -> None:
        """Waits until Comet has all values; offline, ends the archive."""
        if self.run is not None and self._is_offline():
            self.pause()
        elif self.run is not None and not self.run.flush():
            raise TimeoutError("Comet did not get all values")

    def finish(self) -> None:
        """Ends the experiment; offline, numbers its archive."""
        with _without_messages():
            self.run.end()
        if self._is_offline():
            key = self.run.get_key()
            for path, number in self._archives_of(key):
                if number is None:
                    path.rename(path.with_name(f"{key}-{self._archive_count:05d}.zip"))
            self._archive_count += 1

    def _take_over_archives(self, key: str, is_resumed: bool) -> None:
        """Puts aside what was archived after the checkpoint; a new run keeps what there is."""
        for path, number in self._archives_of(key):
            # Comet makes an empty one at the start, which stays if the process is killed.
            if path.stat().st_size == _EMPTY_ARCHIVE_BYTES:
                path.unlink()
            elif is_resumed and (number is None or number >= self._archive_count):
                path.replace(path.with_name(f"killed-{path.name}"))
            elif number is not None:
                self._archive_count = max(self._archive_count, number + 1)

    def _archives_of(self, key: str) -> list[tuple[pathlib.Path, int | None]]:
        """Returns the archives of an experiment, and their numbers if they have been numbered."""
        paths = pathlib.Path(self.run.offline_directory).glob(f"{key}*.zip")
        ends = {path: path.stem.removeprefix(f"{key}-") for path in paths}
        return [(path, int(end) if end.isdigit() else None) for path, end in ends.items()]

    def state(self) -> dict[str, Any]:
        """Waits until Comet has all; returns the experiment's key and the number of archives."""
        return {**super().state(), "archives": self._archive_count}

    def restore(self, state: dict[str, Any], /) -> None:
        """Makes the next `start` continue the experiment of the checkpoint."""
        super().restore(state)
        self._archive_count = state["archives"]

    def end(self) -> None:
        """Ends the experiment, and its archive."""
        super().end()
        self._archive_count = 0


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Context manager: drops what Comet prints when an experiment starts and ends."""
    logger = logging.getLogger("comet_ml")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
