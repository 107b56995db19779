"""Values, pictures and texts for TensorBoard."""

import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from functrain.common._library import import_optional
from functrain.hooks._logger import Line, Logger


class TensorBoard(Logger):
    """A hook that writes event files for TensorBoard, with tensorboardX.

    What a step reports is there under its name, such as ``loss``, what hooks before this one have
    added at a step as well, such as ``val_loss``, and what an epoch came to under ``epoch/``:
    ``epoch/loss``, ``epoch/val_loss``; pictures and texts of a `Sample`, too. The axis counts the
    steps of the training. The numbers of a step are those of that very step. They come one program
    late, so that nobody waits. Of a population each member has tags of its own, ``loss/0``.

    A run that a `functrain.Checkpointer` resumes continues without a gap or a repeated point. Each
    run writes a file of its own. That tells TensorBoard to drop what earlier files of the directory
    have of its first step and of later ones: what a killed run had written after its checkpoint, or
    a run that was started again. To see runs side by side, give each a directory.

    A checkpoint can lie between two lines of one step: after the step's logs, before those of the
    epoch that ends there. So it holds the lines of its step, and the new file begins with them.

    Args:
      directory: Where to write. It is made if it is missing.
      every: Write what every so many steps report; 1 for every step, at some 10 µs each.

    Raises:
      ValueError: `every` is no whole number from 1 on.
      ImportError: tensorboardX is not installed.

    Examples:
      >>> import pathlib, tempfile
      >>> from functrain import Position
      >>> from functrain.events import EpochEnd
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     log = TensorBoard(folder)
      ...     log(EpochEnd(position=Position(step=10), state=(), values={"loss": 0.5}))
      ...     log.close()
      ...     print(next(pathlib.Path(folder).iterdir()).name.startswith("events.out.tfevents."))
      True
    """

    def __init__(self, directory: str | os.PathLike[str], *, every: int = 10) -> None:
        self.directory = pathlib.Path(directory)
        self.resume_key = self.directory.name
        super().__init__(every, directory=str(self.directory), every=every)
        self._x = import_optional(
            "tensorboardX",
            "TensorBoard's files need the library: pip install 'functrain[tensorboard]'",
        )
        self._writer: Any = None
        self._last_lines: list[Line] = []  # those of the last step that was written

    def begin(self) -> None:
        """Makes the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)

    def write(self, lines: Sequence[Line]) -> None:
        """Writes an event a line."""
        known = [x for x in self._last_lines if x.step == lines[0].step]
        if self._writer is None:
            self._open(lines[0].step)
            for line in known:  # which the new file has TensorBoard drop
                self._event(line.step, summary=self._summary(line))
        for line in lines:
            self._event(line.step, summary=self._summary(line))
        self._last_lines = [x for x in (*known, *lines) if x.step == lines[-1].step]

    def _open(self, first_step: int) -> None:
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
        """Flushes the file to the disk; returns the lines of the last step, to be saved."""
        if self._writer is not None:
            with self._errors_warned_of():
                self._writer.flush()
        return {"last_lines": [line._asdict() for line in self._last_lines]}

    def restore(self, state: dict[str, Any], /) -> None:
        """Restores the lines of the last step before the checkpoint."""
        self._last_lines = [Line(**line) for line in state["last_lines"]]

    def end(self) -> None:
        """Closes the file."""
        writer, self._writer, self._last_lines = self._writer, None, []
        if writer is not None:
            writer.close()
