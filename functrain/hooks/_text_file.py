"""A file of lines, which goes on where a checkpoint left it."""

import os
import pathlib
import warnings
from typing import IO, Any


class TextFile:
    """A hook's file of lines: what came after a checkpoint is cut off when a run goes on there.

    Args:
      path: The file. Missing folders are made.
      append: Whether to go on below what the file holds.
    """

    def __init__(self, path: str | os.PathLike[str], append: bool) -> None:
        self.path = pathlib.Path(path)
        self.append = append
        self._replaces = not append  # what an earlier run left
        self._file: IO[str] | None = None

    def begin(self) -> None:
        """Opens the file, so that one that cannot be written is met before a step is taken.

        Raises:
          OSError: It cannot.
        """
        if self._file is not None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", newline="")
        except OSError as error:
            raise type(error)(
                f"path: expected a file that can be written, got {self.path}: {error}. Choose "
                "another path. No step was taken."
            ) from error

    def _size(self) -> int:
        """Returns the bytes of the lines that stay."""
        stays = not self._replaces and self.path.exists()
        return self.path.stat().st_size if stays else 0

    def _add(self, text: str) -> None:
        """Adds lines, the first ones in place of an earlier run's."""
        self.begin()
        assert self._file is not None, "begin() opens it"
        if self._replaces:
            self._file.truncate(0)
            self._replaces = False
        self._file.write(text)
        self._file.flush()

    def state(self) -> dict[str, Any]:
        """Returns how long the file is, to be saved."""
        return {"bytes": self._size()}

    def restore(self, state: dict[str, Any]) -> None:
        """Cuts off the lines that came after the checkpoint: they come again."""
        size, there = state["bytes"], self.path.stat().st_size if self.path.exists() else 0
        if there < size:
            warnings.warn(
                f"{self.path}: expected the {size} bytes it had at the checkpoint, got {there}. "
                "Rows are missing.",
                stacklevel=2,
            )
        elif size:
            os.truncate(self.path, size)
        self._replaces = not (self.append or size)

    def end(self) -> None:
        """Closes the file; one that is opened anew replaces it, unless it appends."""
        if self._file is not None:
            self._file.close()
        self._file, self._replaces = None, not self.append
