"""Text logs: CSV files and JSON lines."""

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

from functrain.common._paths import absolute_path
from functrain.common._warnings import warn
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.hooks._logger import Line, Logger


class TextLogger(Logger):
    """A logger that keeps its file open for appending during a run.

    A run that resumes drops the lines that were written after the checkpoint.

    Args:
      path: The file. Missing directories are created.
      append: True appends to an existing file; False replaces it.
      steps: As for `Logger`.
      repr_fields: Names and values that `repr` shows, in addition to the path and `append`.

    Attributes:
      resume_key: The file's name, so that a directory may be moved between two runs.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        append: bool,
        steps: int | None,
        repr_fields: dict[str, Any],
    ) -> None:
        # The process may change its working directory during the run.
        self.path = absolute_path(path)
        super().__init__(steps, {"path": os.fspath(path), "append": append, **repr_fields})
        self.resume_key = self.path.name
        self.append = append
        # True if lines that are in the file already stay when it is opened.
        self._keeps_lines = append
        self._file: io.FileIO | None = None
        self._line_count = 0  # while the file is open

    def begin(self) -> None:
        """Creates the file, so that a path that cannot be written fails before the first step.

        Raises:
          OSError: The file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("ab").close()

    def _kept_lines(self) -> list[str]:
        """Returns the lines that stay in the file."""
        if not (self._keeps_lines and self.path.exists()):
            return []
        return self.path.read_text(encoding="utf-8").splitlines(keepends=True)

    def _open(self) -> None:
        """Opens the file, unless it is open; notices if it was removed."""
        if self._file is not None and self._is_removed(self.path):
            self._close()
        if self._file is None:
            self.begin()
            self._line_count = len(self._kept_lines())
            # Without a buffer, the file can be read during the run, a killed process loses nothing,
            # and no text is written after its write has failed.
            self._file = self.path.open("ab" if self._keeps_lines else "wb", buffering=0)
            self._keeps_lines = True

    def _add(self, text: str) -> None:
        """Appends lines to the open file; if that fails, the file stays as it was."""
        assert self._file is not None
        size, rest = os.fstat(self._file.fileno()).st_size, text.encode()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise
        self._line_count += text.count("\n")

    def _replace(self, lines: Iterable[str]) -> None:
        """Replaces the lines of the file at once: all stay if the process is killed meanwhile."""
        # Windows replaces no open file.
        self._close()
        new_path = self.path.with_name(f".{self.path.name}.new")
        try:
            new_path.write_text("".join(lines), encoding="utf-8")
            os.replace(new_path, self.path)
        finally:
            new_path.unlink(missing_ok=True)

    def _close(self) -> None:
        # First, so that a file that cannot be closed is not written again.
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def state(self) -> dict[str, Any]:
        """Returns the number of lines in the file, for the checkpoint."""
        return {"lines": len(self._kept_lines()) if self._file is None else self._line_count}

    def restore(self, state: dict[str, Any], /) -> None:
        """Drops the lines that were written after the checkpoint: the run writes them again."""
        count = state["lines"]
        self._keeps_lines = True
        lines = self._kept_lines()
        if len(lines) < count:
            warn(
                f"{self.path}: expected the {count} lines it had at the checkpoint, got "
                f"{len(lines)}. Lines are missing.",
            )
        # A file that is as it was is not opened: it may lie where nothing can be written.
        elif len(lines) > count:
            self._replace(lines[:count])

    def end(self) -> None:
        """Closes the file; the next run replaces it, unless the logger appends."""
        if self._file is not None:
            self._is_removed(self.path)
        self._close()
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

    def __init__(
        self, path: str | os.PathLike[str], *, every: int = 10, append: bool = False
    ) -> None:
        super().__init__(path, append, steps=every, repr_fields={"every": every})

    def write(self, lines: Sequence[Line]) -> None:
        """Writes one JSON object for each line."""
        self._open()
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
        self,
        path: str | os.PathLike[str],
        *,
        append: bool = False,
        every: int | Trigger | None = None,
    ) -> None:
        self.every = as_trigger(every, Every(epochs=1))
        super().__init__(path, append, steps=None, repr_fields={"every": self.every})
        self._columns: list[str] = []

    def write(self, lines: Sequence[Line]) -> None:
        """Writes one row for each line."""
        for line in lines:
            self._open()
            position = {"epoch": line.epoch, "step": line.step}
            row = {**position, **line.values, **position}
            # A dict keeps the order of the columns and drops duplicates.
            columns = list(dict.fromkeys([*self._columns, *row]))
            if columns != self._columns:
                self._set_columns(columns)
                self._open()
            self._add(_csv([row.get(name, "") for name in columns]))

    def _open(self) -> None:
        was_closed = self._file is None
        super()._open()
        if was_closed or not self._line_count:
            self._columns = _header(self._kept_lines())

    def _set_columns(self, columns: list[str]) -> None:
        """Rewrites the file with other columns; new ones come last, and the last are dropped."""
        rows = [columns, *list(csv.reader(self._kept_lines()))[1:]]
        count = len(columns)
        self._replace([_csv([*row, *[""] * count][:count]) for row in rows])

    def state(self) -> dict[str, Any]:
        """Returns the number of lines and the columns, for the checkpoint."""
        columns = _header(self._kept_lines()) if self._file is None else self._columns
        return {**super().state(), "columns": columns}

    def restore(self, state: dict[str, Any], /) -> None:
        """Drops rows and columns that were added after the checkpoint: the run adds them again."""
        super().restore(state)
        if _header(self._kept_lines()) != state["columns"] and state["columns"]:
            self._set_columns(state["columns"])


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


def _header(lines: list[str]) -> list[str]:
    return next(csv.reader(lines[:1]), [])
