"""Writes values to a CSV file."""

import csv
import dataclasses
import io
import itertools
import os
from typing import Any

import numpy as np

from functrain.common import _repr
from functrain.common._values import spread
from functrain.engine._trigger import Trigger, every
from functrain.hooks._logger import LoggingErrors
from functrain.hooks._text_file import TextFile
from functrain.loop._events import ChunkEnd, Event, LogsReady


class CSVLogger(TextFile):
    """A hook that writes a row each time it is due: epoch, step, and the values of that moment.

    At the end of an epoch those are its means, metrics and evaluations; at a step, what the step
    reported, and what hooks before this one have added; that row is written one program late, when
    its numbers are there, so that nobody waits. Of a population each member has columns of its own,
    ``loss/0``, ``loss/1``, ...

    A value that is first reported later, such as that of ``Evaluate(when=every(epochs=2))``, adds a
    column: the file is rewritten, with empty cells in earlier rows. A row that cannot be written,
    as on a full disk, is left out with a warning, and training continues.

    Args:
      path: The file. Missing folders are made.
      append: Whether to write below what the file holds, where it exists; else it is replaced.
        A run that a `functrain.Checkpointer` resumes continues its file in any case, without a
        missing or a repeated row.
      when: A trigger; each epoch by default.

    Raises:
      OSError: (when a run begins) the file cannot be written.

    Examples:
      >>> import pathlib, tempfile
      >>> from functrain import EpochEnd, Position
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     log = CSVLogger(f"{folder}/log.csv")
      ...     log(EpochEnd(position=Position(step=10), state=(), values={"loss": 0.5}))
      ...     log.close()
      ...     print(pathlib.Path(f"{folder}/log.csv").read_text().splitlines())
      ['epoch,step,loss', '0,10,0.5']
    """

    only_first = True  # of several processes

    def __init__(
        self, path: str | os.PathLike[str], *, append: bool = False, when: Trigger | None = None
    ) -> None:
        super().__init__(path, append)
        self.when = every(epochs=1) if when is None else when
        self._columns: list[str] = []  # none before the first row
        self._rows = 0  # in the file, below the columns
        self._errors = LoggingErrors(self)
        self._late: ChunkEnd | None = None  # whose numbers are still under way

    def __repr__(self) -> str:
        return _repr.call(self, path=str(self.path), append=self.append, when=self.when)

    def __call__(self, event: Event, /) -> None:
        """Writes a row; at a step when its numbers have come."""
        self._write_late()
        if isinstance(event, ChunkEnd):
            self._late = dataclasses.replace(event, values=dict(event.values))
        else:
            self._write(event, event.values)

    def logs(self, event: LogsReady, /) -> None:
        """Writes the row that waits: its numbers are on the host by now."""
        self._write_late()

    def _write_late(self) -> None:
        event, self._late = self._late, None
        if event is not None:
            self._write(event, {**event.latest(), **event.values})

    def _write(self, event: Event, values: dict[str, Any]) -> None:
        row = {"epoch": event.epoch, "step": event.step, **_spread(values)}
        with self._errors.warned_of():
            if not self._columns and self._size():
                self._columns, self._rows = self._read()
            if new := [name for name in row if name not in self._columns]:
                self._set_columns([*self._columns, *new])
            self._add(_line([row.get(name, "") for name in self._columns]))
            self._rows += 1

    def _read(self) -> tuple[list[str], int]:
        """Returns the file's columns and its number of rows."""
        with self.path.open(newline="") as file:
            lines = csv.reader(file)
            return next(lines, []), sum(1 for _ in lines)

    def _set_columns(self, columns: list[str]) -> None:
        """Writes the columns; rows that are there keep their cells, and get empty ones."""
        if self._rows:
            self._rewrite(columns, self._rows)
        else:
            self._replaces = True
            self._add(_line(columns))
        self._columns = columns

    def _rewrite(self, columns: list[str], rows: int) -> None:
        """Rewrites the file with other columns, and with its first rows only."""
        with self.path.open(newline="") as file, self._rewritten() as new:
            new.write(_line(columns))
            for cells in itertools.islice(csv.reader(file), 1, 1 + rows):
                cells += [""] * (len(columns) - len(cells))
                new.write(_line(cells[: len(columns)]))

    def state(self) -> dict[str, Any]:
        """Returns the columns and the number of rows, to be saved."""
        if not self._columns and self._size():  # it appends, and has written nothing yet
            self._columns, self._rows = self._read()
        return {"columns": self._columns, "rows": self._rows}

    def restore(self, state: dict[str, Any]) -> None:
        """Drops the rows and columns that came after the checkpoint: the run writes them again."""
        if "rows" not in state:  # saved by functrain 0.2, which counted bytes
            super().restore(state)
            return
        columns, rows = state["columns"], state["rows"]
        there = self._read()[1] if self.path.exists() else 0
        if there < rows:
            self._warn_of_missing_lines(f"the {rows} rows", f"{there}")
        elif rows:
            self._rewrite(columns, rows)
            self._columns, self._rows = columns, rows
        self._replaces = not rows  # what is there was written after the checkpoint

    def close(self) -> None:
        """Writes the row that waits, and closes the file."""
        self._write_late()
        with self._errors.warned_of():
            self.end()
        self._columns, self._rows = [], 0


def _line(cells: list[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _spread(values: dict[str, Any]) -> dict[str, Any]:
    """Spreads what are numbers; anything else is refused in words after all hooks."""
    return {
        k: v
        for n, x in values.items()
        for k, v in (spread({n: x}) if np.ndim(x) == 1 else {n: x}).items()
    }
