"""Values as a CSV file."""

import csv
import dataclasses
import io
import os
from typing import Any

import numpy as np

from functrain.common import _repr
from functrain.common._values import spread
from functrain.engine._trigger import Trigger, every
from functrain.hooks._text_file import TextFile
from functrain.loop._events import ChunkEnd, Event, LogsReady


class CSVLogger(TextFile):
    """A hook that writes a row each time it is due: epoch, step, and the values of that moment.

    At the end of an epoch those are its means, metrics and evaluations; at a step, what the step
    reported, and what hooks before this one have added; that row is written one program late, when
    its numbers are there, so that nobody waits. The columns are those of the first row; of a
    population each member has some of its own, ``loss/0``, ``loss/1``, ...

    Args:
      path: The file. Missing folders are made.
      append: Whether to go on below what the file holds, where it exists; else it is replaced.
        A run that a `functrain.Checkpointer` resumes goes on by itself, without a row too many.
      when: A trigger; each epoch by default.

    Raises:
      OSError: (when a run begins) the file cannot be written.
      ValueError: (when called) a row has a value for which there is no column, or the file to
        append to has other columns.

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
        self._columns: list[str] = []
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
        if not self._columns:
            self._begin_with(list(row))
        new = [name for name in row if name not in self._columns]
        if new:
            raise ValueError(
                f"{self.path}: expected the columns {self._columns}, got {new} as well. Log "
                "values that come at other times to a file of their own: CSVLogger(path, when=...)."
            )
        self._add_row([row.get(name, "") for name in self._columns])

    def _begin_with(self, columns: list[str]) -> None:
        known = self._first_row() if self._size() else []
        if known and set(known) != set(columns):
            raise ValueError(
                f"{self.path}: expected the columns {columns} of this run, got a file that has "
                f"{known}. Take another file, or append=False to replace it."
            )
        self._columns = known or columns
        if not known:
            self._add_row(columns)

    def _first_row(self) -> list[str]:
        with self.path.open(newline="") as file:
            return next(csv.reader(file), [])

    def _add_row(self, cells: list[Any]) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        self._add(line.getvalue())

    def close(self) -> None:
        """Writes the row that waits, and closes the file."""
        self._write_late()
        self.end()
        self._columns = []


def _spread(values: dict[str, Any]) -> dict[str, Any]:
    """Spreads what are numbers; anything else is refused in words after all hooks."""
    return {
        k: v
        for n, x in values.items()
        for k, v in (spread({n: x}) if np.ndim(x) == 1 else {n: x}).items()
    }
