"""Values, pictures and texts for TensorBoard."""

import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from functrain.common._library import needed
from functrain.hooks._logger import Line, Logger


class TensorBoard(Logger):
    """A hook that writes event files for TensorBoard, with tensorboardX.

    What a step reports is there under its name, such as ``loss``, what hooks before this one have
    added at a step as well, such as ``val_loss``, and what an epoch came to under ``epoch/``:
    ``epoch/loss``, ``epoch/val_loss``; pictures and texts of a `Sample`, too. The axis counts the
    steps of the training. The numbers of a step are those of that very step. They come one program
    late, so that nobody waits. Of a population each member has tags of its own, ``loss/0``.

    A run that a `functrain.Checkpointer` resumes goes on without a gap. Each run writes a file of
    its own. It tells TensorBoard to leave out what earlier files of the directory say of its first
    step and of those after it: what a run that was killed had written after its checkpoint, and a
    run that was begun anew. To see runs side by side, give each a directory.

    Args:
      directory: Where to write. It is made if it is missing.
      steps: Write what every so many steps report; 1 for every step, at some 10 µs each.

    Raises:
      ValueError: `steps` is no whole number from 1 on.
      ImportError: tensorboardX is not installed.

    Examples:
      >>> import pathlib, tempfile
      >>> from functrain import EpochEnd, Position
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     log = TensorBoard(folder)
      ...     log(EpochEnd(position=Position(step=10), state=(), values={"loss": 0.5}))
      ...     log.close()
      ...     print(next(pathlib.Path(folder).iterdir()).name.startswith("events.out.tfevents."))
      True
    """

    def __init__(self, directory: str | os.PathLike[str], *, steps: int = 10) -> None:
        self.directory = pathlib.Path(directory)
        super().__init__(steps, directory=str(self.directory))
        self._x = needed(
            "tensorboardX",
            "TensorBoard's files need the library: pip install 'functrain[tensorboard]'",
        )
        self._writer: Any = None

    def begin(self) -> None:
        """Makes the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)

    def write(self, lines: Sequence[Line]) -> None:
        """Writes an event a line."""
        if self._writer is None:
            self._writer = self._open(lines[0].step)
        for line in lines:
            self._event(line.step, summary=self._summary(line))

    def _open(self, first_step: int) -> Any:
        self.begin()
        # Its SummaryWriter hands events to a thread through a pipe, and cannot say when they are on
        # the disk; this one is beneath it, and writes them. The time in a file's name is in
        # seconds; files are read in the order of their names.
        self._writer = self._x.event_file_writer.EventsWriter(
            str(self.directory / "events"), f".{time.time_ns()}"
        )
        # Readers leave out what they have read of this step and of later ones.
        log = self._x.proto.event_pb2.SessionLog
        self._event(first_step, session_log=log(status=log.START))
        return self._writer

    def _event(self, step: int, **content: Any) -> None:
        event = self._x.proto.event_pb2.Event(wall_time=time.time(), step=step, **content)
        self._writer.write_event(event)

    def _summary(self, line: Line) -> Any:
        of = self._x.summary
        summary = of.Summary(
            value=[of.Summary.Value(tag=name, simple_value=x) for name, x in line.values.items()]
        )
        for name, sample in line.samples.items():
            is_text = isinstance(sample, str)
            summary.MergeFrom(
                of.text(name, sample) if is_text else of.image(name, sample, dataformats="HWC")
            )
        return summary

    def state(self) -> dict[str, Any]:
        """Writes to the disk what was logged; there is nothing to save."""
        if self._writer is not None:
            self._writer.flush()
        return {}

    def end(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
