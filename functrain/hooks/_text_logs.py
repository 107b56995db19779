"""Text logs: CSV files and JSON lines."""

import contextlib
import csv
import io
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from functrain.checkpoint._files import Disk
from functrain.common._checks import require
from functrain.common._paths import PathArg, absolute_path
from functrain.common._warnings import warn
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.hooks._logger import Line, Logger


class TextLogger(Logger):
    """A logger that appends lines to a file.

    A run that resumes drops the lines that were written after the checkpoint.

    Args:
      path: The file. Missing directories are created.
      append: True appends to an existing file; False replaces it.
      steps: As for `Logger`.

    Attributes:
      resume_key: The file's name, so that a directory may be moved between two runs.
    """

    def __init__(self, path: PathArg, append: bool, steps: int | None) -> None:
        super().__init__(steps)
        # The process may change its working directory during the run.
        self.path = absolute_path(path)
        self.resume_key = self.path.name
        self.append = append
        # False until the first lines of a run replace those of an earlier one.
        self._keeps_lines = append

    def begin(self) -> None:
        """Creates the file, so that a path that cannot be written fails before the first step.

        Raises:
          OSError: The file cannot be written.
          ValueError: It is a pipe.
        """
        # Reading its lines would wait for ever.
        require(not self.path.is_fifo(), "path", "a file", "a pipe")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("ab").close()
        self.file = self.path

    def _kept_lines(self) -> Iterator[str]:
        """Yields the lines that stay in the file."""
        if self._keeps_lines and self.path.exists():
            with self.path.open(encoding="utf-8") as file:
                yield from file

    def _add(self, text: str) -> None:
        """Appends lines; if that fails, the file stays as it was."""
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            # Closed after each write, so that a killed process loses nothing.
            with self.path.open("ab" if self._keeps_lines else "wb") as file:
                self._keeps_lines = True
                file.write(text.encode())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)
            raise

    def _replace(self, lines: Iterable[str]) -> None:
        """Replaces the lines of the file at once: all stay if the process is killed meanwhile."""
        Disk().replace(str(self.path), "".join(lines).encode())
        self._keeps_lines = True

    def state(self) -> dict[str, Any]:
        """Returns the number of lines in the file, for the checkpoint."""
        return {"lines": sum(1 for _ in self._kept_lines())}

    def restore(self, state: dict[str, Any], /) -> None:
        """Drops the lines that were written after the checkpoint: the run writes them again."""
        count = state["lines"]
        self._keeps_lines = True
        lines = list(self._kept_lines())
        if len(lines) < count:
            warn(
                f"{self.path}: expected the {count} lines it had at the checkpoint, got "
                f"{len(lines)}. Lines are missing.",
            )
        # A file that is as it was is not opened: it may lie where nothing can be written.
        elif len(lines) > count:
            self._replace(lines[:count])

    def end(self) -> None:
        """Makes the next run replace the file, unless the logger appends."""
        self._keeps_lines = self.append


class JSONLines(TextLogger):
    """A hook that writes JSON lines: the logs of steps, and the values of hooks and epochs.

    ``{"step": 20, "epoch": 0, "loss": 0.5}`` is a step, with the values that earlier hooks have
    added to it, including texts of a `Sample`. ``{"step": 50, "epoch": 0, "epoch/loss": 0.6,
    "epoch/val_loss": 0.7}`` is an epoch. The values of a step are exact, and are written one
    program late, so that the loop does not wait for the device. Read the file with
    ``pandas.read_json(path, lines=True)``.

    A run that a `functrain.Checkpointer` resumes continues the file without repeated or missing
    lines.

    Args:
      path: The file. Missing directories are created.
      every: The logs of every `every`-th step are written; 1 writes all.
      append: True appends to an existing file; False replaces it.

    Raises:
      ValueError: `every` is not a positive integer.
      OSError: (when a run begins) the file cannot be written.

    A number that is not finite is written as null, since JSON cannot represent it.

    Examples:
      >>> import pathlib, tempfile
      >>> from functrain import Position
      >>> from functrain.events import EpochEnd
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     log = JSONLines(f"{folder}/log.jsonl")
      ...     log(EpochEnd(position=Position(step=10), state=(), values={"loss": 0.5}))
      ...     log.close()
      ...     print(pathlib.Path(f"{folder}/log.jsonl").read_text().rstrip())
      {"step": 10, "epoch": 0, "epoch/loss": 0.5}
    """

    def __init__(self, path: PathArg, *, every: int = 10, append: bool = False) -> None:
        super().__init__(path, append, steps=every)

    def write(self, lines: Sequence[Line]) -> None:
        """Writes one JSON object for each line."""
        self._add("".join(f"{_json(line)}\n" for line in lines))


class CSVLogger(TextLogger):
    """A hook that writes a CSV row each time it is due: the epoch, the step, and the values.

    At the end of an epoch, the values are its means, metrics and evaluations. At a step, they are
    its logs and the values that earlier hooks have added; that row is written one program late, so
    that the loop does not wait for the device. For a population, each member has its columns:
    ``loss/0``, ``loss/1``, ...

    A value that is first reported later, such as that of ``Evaluate(every=every(epochs=2))``, adds
    a column: the file is rewritten, with empty cells in earlier rows. A row that cannot be written,
    for example on a full disk, is dropped with a warning, and training continues.

    Args:
      path: The file. Missing directories are created.
      append: True appends to an existing file; False replaces it. A run that a
        `functrain.Checkpointer` resumes always continues its file, without missing or repeated
        rows.
      every: A number of steps, or a trigger such as ``ft.every(seconds=60)``; each epoch by
        default.

    Raises:
      OSError: (when a run begins) the file cannot be written.

    Examples:
      >>> import pathlib, tempfile
      >>> from functrain import Position
      >>> from functrain.events import EpochEnd
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     log = CSVLogger(f"{folder}/log.csv")
      ...     log(EpochEnd(position=Position(step=10), state=(), values={"loss": 0.5}))
      ...     log.close()
      ...     print(pathlib.Path(f"{folder}/log.csv").read_text().splitlines())
      ['epoch,step,loss', '0,10,0.5']
    """

    # Rows of epochs and of steps share their columns.
    epoch_prefix = ""

    def __init__(
        self, path: PathArg, *, append: bool = False, every: int | Trigger | None = None
    ) -> None:
        super().__init__(path, append, steps=None)
        self.every = as_trigger(every, Every(epochs=1))

    def write(self, lines: Sequence[Line]) -> None:
        """Writes one row for each line."""
        rows: list[dict[str, Any]] = []
        for line in lines:
            position = {"epoch": line.epoch, "step": line.step}
            rows.append({**position, **line.values, **position})
        header = next(csv.reader(self._kept_lines()), [])
        # A dict keeps the order of the columns and drops duplicates.
        columns = list(dict.fromkeys(itertools.chain(header, *rows)))
        if columns != header:
            # New columns come last, and are empty in earlier rows.
            earlier_rows = list(csv.reader(self._kept_lines()))[1:]
            empty_cells = [""] * (len(columns) - len(header))
            self._replace(map(_csv, [columns, *([*row, *empty_cells] for row in earlier_rows)]))
        self._add("".join(_csv([row.get(name, "") for name in columns]) for row in rows))


def _json(line: Line) -> str:
    """Returns a line as a JSON object, with null for numbers that JSON cannot represent."""
    texts = {name: x for name, x in line.samples.items() if isinstance(x, str)}
    numbers = {name: x if math.isfinite(x) else None for name, x in line.values.items()}
    position = {"step": line.step, "epoch": line.epoch}
    return json.dumps({**position, **numbers, **texts, **position})


def _csv(cells: Iterable[Any]) -> str:
    """Returns a row as text; unlike a join, the csv module quotes cells that need it."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
