"""A log file that is open for appending while a run lasts."""

import contextlib
import os
import pathlib
import warnings
from collections.abc import Iterator
from typing import IO, Any


class TextFile:
    """A hook's log file: a run that resumes drops what was written after the checkpoint.

    Args:
      path: The file. Missing folders are made.
      append: Whether to write below what the file holds.

    Attributes:
      resume_key: The file's name, so that a directory may be moved between two runs.
    """

    def __init__(self, path: str | os.PathLike[str], append: bool) -> None:
        self.path = pathlib.Path(path)
        self.resume_key = self.path.name
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

    @contextlib.contextmanager
    def _rewritten(self) -> Iterator[IO[str]]:
        """Yields a new file, which replaces this one in one step unless there is an error."""
        new = self.path.with_name(f".{self.path.name}.new")
        try:
            with new.open("w", newline="") as file:
                yield file
            os.replace(new, self.path)
        finally:
            new.unlink(missing_ok=True)
        if self._file is not None:  # it is open for the file that was replaced
            self._file.close()
            self._file = self.path.open("a", newline="")

    def state(self) -> dict[str, Any]:
        """Returns how long the file is, to be saved."""
        return {"bytes": self._size()}

    def restore(self, state: dict[str, Any]) -> None:
        """Cuts off the lines that were written after the checkpoint: the run writes them again."""
        size, there = state["bytes"], self.path.stat().st_size if self.path.exists() else 0
        if there < size:
            self._warn_of_missing_lines(f"the {size} bytes", f"{there}")
        elif size:
            os.truncate(self.path, size)
        self._replaces = not size  # what is there was written after the checkpoint

    def _warn_of_missing_lines(self, saved: str, there: str) -> None:
        warnings.warn(
            f"{self.path}: expected {saved} it had at the checkpoint, got {there}. Lines are "
            "missing.",
            stacklevel=3,
        )

    def end(self) -> None:
        """Closes the file; one that is opened anew replaces it, unless it appends."""
        if self._file is not None:
            self._file.close()
        self._file, self._replaces = None, not self.append
