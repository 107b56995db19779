"""Text logs: CSV files and JSON lines."""

import contextlib
import csv
import io
import itertools
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
        self._has_warned_of_names = False

    def begin(self) -> None:
        """Creates the file, so that a path that cannot be written fails before the first step.

        Raises:
          OSError: The file cannot be written.
        """
        if self._is_stream:
            return  # the reader of a pipe takes it for the end when the file is closed
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as error:
            # The same class, such as PermissionError, with the advice in its message.
            raise type(error)(
                f"path: expected a file that can be written, got {self.path}: {error}. Choose "
                "another path. No step was taken."
            ) from error

    @property
    def _is_stream(self) -> bool:
        """True for a pipe or a device, such as /dev/null: what was written cannot be changed."""
        return self.path.exists() and not (self.path.is_file() or self.path.is_dir())

    def _add(self, text: str) -> None:
        """Appends text to the file; if that fails, as on a full disk, the file stays as it was."""
        if self._file is None:
            self.begin()
            # Without a buffer, the file can be read during the run, a killed process loses nothing,
            # and no text is written after its write has failed.
            self._file = self.path.open("ab", buffering=0)
            if not (self._keeps_lines or self._is_stream):
                self._file.truncate(0)
        size, rest = os.fstat(self._file.fileno()).st_size, text.encode()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise

    def _fields(self, position: dict[str, int], values: dict[str, Any]) -> dict[str, Any]:
        """Returns the position and the values of a line, without values named like the position."""
        hidden = sorted(position.keys() & values.keys())
        if hidden and not self._has_warned_of_names:
            self._has_warned_of_names = True
            warn(
                f"{self!r}: expected values with other names than those of the position, 'step' "
                f"and 'epoch', got {hidden}. They are not written: rename them.",
            )
        return {**position, **values, **position}

    def _notice_removal(self) -> bool:
        """Closes the file with a warning if it was removed or replaced; returns True then."""
        if self._file is None or self._is_stream:
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                return False
        self._close(keeps_lines=True)
        warn(
            f"{self.path}: expected the file of this log, but it was removed or replaced during "
            "the run. Its lines so far are missing; later ones go into a new file."
        )
        return True

    def _close(self, keeps_lines: bool) -> None:
        # First, so that a file that cannot be closed is not written again.
        file, self._file, self._keeps_lines = self._file, None, keeps_lines
        if file is not None:
            file.close()

    def _kept_bytes(self) -> int:
        """Returns the size of the part of the file that stays when the next line is written."""
        is_kept = self._keeps_lines or self._file is not None
        return self.path.stat().st_size if is_kept and self.path.exists() else 0

    def state(self) -> dict[str, Any]:
        """Returns the size of the file, for the checkpoint."""
        return {"bytes": self._kept_bytes()}

    def restore(self, state: dict[str, Any], /) -> None:
        """Truncates lines that were written after the checkpoint: the run writes them again."""
        if self._is_stream:
            return
        saved_size = state["bytes"]
        # If the file was empty at the checkpoint, all of its lines were written after it.
        self._keeps_lines = bool(saved_size)
        size = self._kept_bytes()
        # A file that is as it was is not opened: the result of a finished run may be read where
        # nothing can be written.
        if self._is_complete(saved_size, size, "bytes") and 0 < saved_size < size:
            os.truncate(self.path, saved_size)

    def _is_complete(self, saved_count: int, count: int, unit: str) -> bool:
        """Returns True if the file is at least as long as at the checkpoint; warns otherwise."""
        if count < saved_count:
            warn(
                f"{self.path}: expected the {saved_count} {unit} it had at the checkpoint, got "
                f"{count}. Lines are missing.",
            )
        return count >= saved_count

    def end(self) -> None:
        """Closes the file; the next run replaces it, unless the logger appends."""
        self._notice_removal()
        self._close(keeps_lines=self.append)


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
        self._notice_removal()
        self._add("".join(f"{self._json(line)}\n" for line in lines))

    def _json(self, line: Line) -> str:
        texts = {name: x for name, x in line.samples.items() if isinstance(x, str)}
        numbers = {name: x if math.isfinite(x) else None for name, x in line.values.items()}
        position = {"step": line.step, "epoch": line.epoch}
        return json.dumps(self._fields(position, {**numbers, **texts}))


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
        # Empty before the first row is written or read.
        self._columns: list[str] = []
        # The number of rows in the file, without the header.
        self._row_count = 0

    def begin(self) -> None:
        """Creates the file; if lines of an existing file stay, reads its columns."""
        super().begin()
        if not self._columns and self._kept_bytes():
            self._columns, self._row_count = self._read()

    def _read(self) -> tuple[list[str], int]:
        """Returns the columns and the number of rows of the file."""
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            return next(rows, []), len(list(rows))

    def write(self, lines: Sequence[Line]) -> None:
        """Writes one row for each line."""
        if self._notice_removal():
            self._columns, self._row_count = [], 0
        if self._file is None:
            self.begin()
        for line in lines:
            row = self._fields({"epoch": line.epoch, "step": line.step}, line.values)
            if not row.keys() <= set(self._columns):
                # A dict keeps the order of the columns and drops duplicates.
                self._set_columns(list(dict.fromkeys([*self._columns, *row])))
            self._add(_csv([row.get(name, "") for name in self._columns]))
            self._row_count += 1

    def _set_columns(self, columns: list[str]) -> None:
        """Writes a new header; keeps the first `_row_count` rows, with empty new cells."""
        if self._is_stream or not self._row_count:
            if not self._is_stream:
                self._close(keeps_lines=False)
            self._add(_csv(columns))
        else:
            # Replacing the file at once keeps all rows if the process is killed meanwhile.
            new_path = self.path.with_name(f".{self.path.name}.new")
            try:
                with (
                    self.path.open(newline="", encoding="utf-8") as file,
                    new_path.open("w", newline="", encoding="utf-8") as new,
                ):
                    new.write(_csv(columns))
                    for cells in itertools.islice(csv.reader(file), 1, 1 + self._row_count):
                        # New columns come last, and columns that a restored run drops are last too.
                        cells += [""] * (len(columns) - len(cells))
                        new.write(_csv(cells[: len(columns)]))
                # The open file is the one to be replaced, which Windows refuses for open files.
                self._close(keeps_lines=True)
                os.replace(new_path, self.path)
            finally:
                new_path.unlink(missing_ok=True)
        self._columns = columns

    def state(self) -> dict[str, Any]:
        """Returns the columns and the number of rows, for the checkpoint."""
        return {"columns": self._columns, "rows": self._row_count}

    def restore(self, state: dict[str, Any], /) -> None:
        """Drops rows and columns that were added after the checkpoint: the run adds them again."""
        if self._is_stream:
            return
        saved_count = state["rows"]
        self._keeps_lines = bool(saved_count)
        columns, count = self._read() if self.path.exists() else ([], 0)
        if self._is_complete(saved_count, count, "rows") and saved_count:
            self._row_count = saved_count
            if (columns, count) == (state["columns"], saved_count):
                self._columns = columns
            else:
                self._set_columns(state["columns"])

    def end(self) -> None:
        """Closes the file."""
        super().end()
        self._columns, self._row_count = [], 0


def _csv(cells: Iterable[Any]) -> str:
    """Returns a row as text; unlike a join, the csv module quotes cells that need it."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
