"""Log files of text: CSV and JSON lines."""

import csv
import io
import itertools
import json
import math
import os
import pathlib
import warnings
from collections.abc import Iterable, Sequence
from typing import IO, Any

from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.hooks._logger import Line, Logger


class TextLogger(Logger):
    """A logger whose file is open for appending while a run lasts.

    A run that resumes drops what was written after the checkpoint.

    Args:
      path: The file. Missing folders are made.
      append: Whether to write below what the file holds.
      steps: As for `Logger`.
      **shown: What else `repr` shows.

    Attributes:
      resume_key: The file's name, so that a directory may be moved between two runs.
    """

    def __init__(
        self, path: str | os.PathLike[str], append: bool, steps: int | None, /, **shown: Any
    ) -> None:
        self.path = pathlib.Path(path)
        super().__init__(steps, path=str(self.path), append=append, **shown)
        self.resume_key = self.path.name
        self.append = append
        self._keeps_lines = append  # those that the file has before the first one is added
        self._file: IO[str] | None = None

    def begin(self) -> None:
        """Makes the file, so that one that cannot be written is met before a step is taken.

        Raises:
          OSError: It cannot.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as error:
            raise type(error)(
                f"path: expected a file that can be written, got {self.path}: {error}. Choose "
                "another path. No step was taken."
            ) from error

    def _add(self, text: str) -> None:
        """Adds lines."""
        if self._file is None:
            self.begin()
            self._file = self.path.open("a" if self._keeps_lines else "w", newline="")
        self._file.write(text)
        self._file.flush()

    def _close(self, keeps_lines: bool) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._keeps_lines = None, keeps_lines

    def _size(self) -> int:
        """Returns the bytes of the lines that stay."""
        stays = self._keeps_lines or self._file is not None
        return self.path.stat().st_size if stays and self.path.exists() else 0

    def state(self) -> dict[str, Any]:
        """Returns how long the file is, to be saved."""
        return {"bytes": self._size()}

    def restore(self, state: dict[str, Any], /) -> None:
        """Cuts off the lines that were written after the checkpoint: the run writes them again."""
        saved = state["bytes"]
        self._keeps_lines = bool(saved)  # else all were written after the checkpoint
        if self._has(saved, self._size(), "bytes") and saved:
            os.truncate(self.path, saved)

    def _has(self, saved: int, there: int, unit: str) -> bool:
        """Returns True if the file is as long as it was at the checkpoint; else warns."""
        if there < saved:
            warnings.warn(
                f"{self.path}: expected the {saved} {unit} it had at the checkpoint, got {there}. "
                "Lines are missing.",
                stacklevel=3,
            )
        return there >= saved

    def end(self) -> None:
        """Closes the file; one that is opened anew replaces it, unless it appends."""
        self._close(keeps_lines=self.append)


class JSONLines(TextLogger):
    """A hook that writes a JSON object a line: what steps report, and what hooks and epochs add.

    ``{"step": 20, "epoch": 0, "loss": 0.5}`` is a step, with what hooks before this one have added
    to it, texts of a `Sample` included; ``{"step": 50, "epoch": 0, "epoch/loss": 0.6,
    "epoch/val_loss": 0.7}`` an epoch. The numbers of a step are those of that very step. They come
    one program late, so that nobody waits. ``pandas.read_json(path, lines=True)`` reads them.

    A run that a `functrain.Checkpointer` resumes goes on without a line too many or missing.

    Args:
      path: The file. Missing folders are made.
      every: Write what every so many steps report; 1 for every step.
      append: Whether to go on below what the file holds; else it is replaced.

    Raises:
      ValueError: `every` is no whole number from 1 on.
      OSError: (when a run begins) the file cannot be written.

    A number that is not finite is written as null: JSON has no other way.

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
        super().__init__(path, append, every, every=every)

    def write(self, lines: Sequence[Line]) -> None:
        """Writes an object a line."""
        self._add("".join(f"{_json(line)}\n" for line in lines))


def _json(line: Line) -> str:
    texts = {name: x for name, x in line.samples.items() if isinstance(x, str)}
    numbers = {name: x if math.isfinite(x) else None for name, x in line.values.items()}
    return json.dumps({"step": line.step, "epoch": line.epoch, **numbers, **texts})


class CSVLogger(TextLogger):
    """A hook that writes a row each time it is due: epoch, step, and the values of that moment.

    At the end of an epoch those are its means, metrics and evaluations; at a step, what the step
    reported, and what hooks before this one have added; that row is written one program late, when
    its numbers are there, so that nobody waits. Of a population each member has columns of its own,
    ``loss/0``, ``loss/1``, ...

    A value that is first reported later, such as that of ``Evaluate(every=every(epochs=2))``, adds
    a column: the file is rewritten, with empty cells in earlier rows. A row that cannot be written,
    as on a full disk, is left out with a warning, and training continues.

    Args:
      path: The file. Missing folders are made.
      append: Whether to write below what the file holds, where it exists; else it is replaced.
        A run that a `functrain.Checkpointer` resumes continues its file in any case, without a
        missing or a repeated row.
      every: A number of steps, or a trigger such as ``ft.every(seconds=60)``. The end of each epoch
        by default.

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

    epoch_prefix = ""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        append: bool = False,
        every: int | Trigger | None = None,
    ) -> None:
        self.every = as_trigger(every, Every(epochs=1))
        super().__init__(path, append, None, every=self.every)
        self._columns: list[str] = []  # none before the first row
        self._rows = 0  # in the file, below the columns

    def begin(self) -> None:
        """Makes the file, or reads the columns of one that it appends to."""
        super().begin()
        if not self._columns and self._size():
            self._columns, self._rows = self._read()

    def _read(self) -> tuple[list[str], int]:
        """Returns the file's columns and its number of rows."""
        with self.path.open(newline="") as file:
            rows = csv.reader(file)
            return next(rows, []), sum(1 for _ in rows)

    def write(self, lines: Sequence[Line]) -> None:
        """Writes a row a line."""
        if self._file is None:
            self.begin()
        for line in lines:
            row: dict[str, Any] = {"epoch": line.epoch, "step": line.step, **line.values}
            if not row.keys() <= set(self._columns):
                self._set_columns(list(dict.fromkeys([*self._columns, *row])))
            self._add(_csv([row.get(name, "") for name in self._columns]))
            self._rows += 1

    def _set_columns(self, columns: list[str]) -> None:
        """Writes the columns; of the rows below, the first `_rows` stay, with empty new cells."""
        if not self._rows:
            self._close(keeps_lines=False)
            self._add(_csv(columns))
        else:
            new_path = self.path.with_name(f".{self.path.name}.new")
            try:
                with self.path.open(newline="") as file, new_path.open("w", newline="") as new:
                    new.write(_csv(columns))
                    for cells in itertools.islice(csv.reader(file), 1, 1 + self._rows):
                        cells += [""] * (len(columns) - len(cells))
                        new.write(_csv(cells[: len(columns)]))
                os.replace(new_path, self.path)
            finally:
                new_path.unlink(missing_ok=True)
            self._close(keeps_lines=True)  # the file that was replaced
        self._columns = columns

    def state(self) -> dict[str, Any]:
        """Returns the columns and the number of rows, to be saved."""
        return {"columns": self._columns, "rows": self._rows}

    def restore(self, state: dict[str, Any], /) -> None:
        """Drops the rows and columns that came after the checkpoint: the run writes them again."""
        saved = state["rows"]
        self._keeps_lines = bool(saved)
        there = self._read()[1] if self.path.exists() else 0
        if self._has(saved, there, "rows") and saved:
            self._rows = saved
            self._set_columns(state["columns"])

    def end(self) -> None:
        """Closes the file."""
        super().end()
        self._columns, self._rows = [], 0


def _csv(cells: Iterable[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
