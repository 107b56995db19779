"""Values, pictures and texts for TensorBoard."""

import os
import time
from collections.abc import Sequence
from typing import Any

from functrain.common._library import import_optional
from functrain.common._paths import PathArg, absolute_path
from functrain.hooks._logger import Line, Logger


class TensorBoard(Logger):
    """A hook that writes event files for TensorBoard, with tensorboardX.

    The logs of a step are written under their names, such as ``loss``, together with the values
    that earlier hooks added at that step, such as ``val_loss``. The values of an epoch have the
    prefix ``epoch/``: ``epoch/loss``, ``epoch/val_loss``. Pictures and texts of a `Sample` are
    written as well. The horizontal axis counts training steps. The values of a step are exact, and
    are written one program late, so that the loop does not wait for the device. For a population,
    each member has its tags: ``loss/0``, ``loss/1``, ...

    A run that a `functrain.Checkpointer` resumes continues without a gap or a repeated point. Each
    run writes a new file. The file tells TensorBoard to drop the points of earlier files in the
    directory from its first step on: points that a killed run wrote after its checkpoint, or a run
    that was started again. To compare runs side by side, give each a directory.

    A checkpoint may fall between two lines of one step: after the logs of the step, and before the
    values of the epoch that ends there. It therefore holds the lines of its step, and the new file
    begins with them.

    Args:
      directory: The directory for the files. It is created if it is missing.
      every: The logs of every `every`-th step are written; 1 writes all, at about 10 µs each.

    Raises:
      ValueError: `every` is not a positive integer.
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

    def __init__(self, directory: PathArg, *, every: int = 10) -> None:
        # The process may change its working directory during the run.
        self.directory = absolute_path(directory, "directory")
        self.resume_key = self.directory.name
        super().__init__(every)
        hint = "TensorBoard's files need the library: pip install 'functrain[tensorboard]'"
        self._tensorboardx = import_optional("tensorboardX", hint)
        self._writer: Any = None
        # The lines of the last step that was written: the file of a resumed run begins with them.
        self._last_lines: list[Line] = []

    def begin(self) -> None:
        """Creates the directory."""
        os.makedirs(self.directory, exist_ok=True)

    def write(self, lines: Sequence[Line]) -> None:
        """Writes one event for each line."""
        earlier_lines = [x for x in self._last_lines if x.step == lines[0].step]
        is_new = self._writer is None
        if is_new:
            self._open(lines[0].step)
        # A new file makes TensorBoard drop the earlier lines of its first step.
        for line in (*earlier_lines, *lines) if is_new else lines:
            self._event(line.step, summary=self._summary(line))
        self._last_lines = [x for x in (*earlier_lines, *lines) if x.step == lines[-1].step]

    def _open(self, first_step: int) -> None:
        self.begin()
        # tensorboardX's SummaryWriter passes events to a thread through a pipe, and does not know
        # when they are on disk. The EventsWriter below it writes them directly. TensorBoard reads
        # files in the order of their names. The time in a name has whole seconds only, and the
        # suffix orders files of the same second.
        suffix = f".{time.time_ns()}"
        writer = self._tensorboardx.event_file_writer.EventsWriter
        self._writer = writer(str(self.directory / "events"), suffix)
        self.file = next(self.directory.glob(f"events.*{suffix}"))
        # A session start makes readers drop the events that they have read from this step on.
        session_log = self._tensorboardx.proto.event_pb2.SessionLog
        self._event(first_step, session_log=session_log(status=session_log.START))

    def _event(self, step: int, **content: Any) -> None:
        event = self._tensorboardx.proto.event_pb2.Event
        self._writer.write_event(event(wall_time=time.time(), step=step, **content))

    def _summary(self, line: Line) -> Any:
        module = self._tensorboardx.summary
        value = module.Summary.Value
        values = [value(tag=name, simple_value=x) for name, x in line.values.items()]
        summary = module.Summary(value=values)
        for name, sample in line.samples.items():
            if isinstance(sample, str):
                summary.MergeFrom(module.text(name, sample))
            else:
                summary.MergeFrom(module.image(name, sample, dataformats="HWC"))
        return summary

    def state(self) -> dict[str, Any]:
        """Flushes the file to disk; returns the lines of the last step, for the checkpoint."""
        if self._writer is not None:
            with self._warn_of_errors():
                self._writer.flush()
        return {"last_lines": list(map(Line._asdict, self._last_lines))}

    def restore(self, state: dict[str, Any], /) -> None:
        """Restores the lines of the last step before the checkpoint."""
        self._last_lines = [Line(**line) for line in state["last_lines"]]

    def end(self) -> None:
        """Closes the file."""
        writer, self._writer, self._last_lines = self._writer, None, []
        self.file = None
        if writer is not None:
            writer.close()
