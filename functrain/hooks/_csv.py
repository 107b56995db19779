"""Values as a CSV file."""

import csv
import os
import pathlib
import warnings
from typing import IO, Any

from functrain.common import _repr
from functrain.engine._trigger import Trigger, every
from functrain.loop._events import ChunkEnd, Event


class CSVLogger:
    """A hook that writes a row each time it is due: epoch, step, and the values of that moment.

    At the end of an epoch those are its means, metrics and evaluations; at a step, what the step
    reported, and what hooks before this one have added. The columns are those of the first row.

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

    def __init__(
        self, path: str | os.PathLike[str], *, append: bool = False, when: Trigger | None = None
    ) -> None:
        self.path = pathlib.Path(path)
        self.append = append
        self.when = every(epochs=1) if when is None else when
        self._file: IO[str] | None = None
        self._writer: Any = None
        self._goes_on = False  # where a run that is resumed left it

    def __repr__(self) -> str:
        return _repr.call(self, path=str(self.path), append=self.append, when=self.when)

    def begin(self) -> None:
        """Finds out before the first step whether the file can be written; leaves it as it is.

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

    def __call__(self, event: Event, /) -> None:
        """Writes a row."""
        known = event.latest() if isinstance(event, ChunkEnd) else {}
        row = {"epoch": event.epoch, "step": event.step, **known, **event.values}
        file = self._file or self._open(list(row))
        new = [name for name in row if name not in self._writer.fieldnames]
        if new:
            raise ValueError(
                f"{self.path}: expected the columns {self._writer.fieldnames}, got {new} as well. "
                "Log values that come at other times to a file of their own: "
                "CSVLogger(path, when=...)."
            )
        self._writer.writerow(row)
        file.flush()

    def _open(self, columns: list[str]) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = _columns(self.path) if self.append or self._goes_on else None
        if known and set(known) != set(columns):
            raise ValueError(
                f"{self.path}: expected the columns {columns} of this run, got a file that has "
                f"{known}. Take another file, or append=False to replace it."
            )
        self._file = self.path.open("a" if known else "w", newline="")
        self._writer = csv.DictWriter(self._file, known or columns, lineterminator="\n")
        if not known:
            self._writer.writeheader()
        return self._file

    def state(self) -> dict[str, Any]:
        """Returns how long the file is, to be saved."""
        there = self.path.exists() and (self._file is not None or self._goes_on)
        return {"bytes": self.path.stat().st_size if there else 0}

    def restore(self, state: dict[str, Any]) -> None:
        """Cuts off the rows that came after the checkpoint: they come again."""
        size, there = state["bytes"], self.path.stat().st_size if self.path.exists() else 0
        if there < size:
            warnings.warn(
                f"{self.path}: expected the {size} bytes it had at the checkpoint, got {there}. "
                "Rows are missing.",
                stacklevel=2,
            )
        elif size:
            os.truncate(self.path, size)
        self._goes_on = size > 0

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = self._writer = None


def _columns(path: pathlib.Path) -> list[str] | None:
    """Returns the first row of a file, None if there is none."""
    if not path.exists():
        return None
    with path.open(newline="") as file:
        return next(csv.reader(file), None)
