"""The checkpoints of one training: a directory with one for each step, and one writer."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import IO, Any

from functrain.checkpoint._errors import CheckpointCorruptError
from functrain.checkpoint._place import find, put, remove, staged, take_back, tidy
from functrain.checkpoint._store import is_step, read_about

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCK, _DAMAGED = ".lock", "damaged-"
_held: set[IO[str]] = set()


def _let_go() -> None:
    """Closes the locks in a child: a loader's worker may live on after this process is killed."""
    while _held:
        _held.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Directory:
    """Directories by step, `000000001200`: only whole ones have such a name.

    Args:
      path: Where they are. Made when something is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.realpath(path)
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise FileExistsError(
                f"{self.path}: expected a directory for checkpoints, got a file. Choose another."
            )
        self._lock: IO[str] | None = None

    def place(self, step: int) -> str:
        """Returns where a step's checkpoint stands."""
        return os.path.join(self.path, f"{step:012d}")

    def at(self, step: int) -> str:
        """Returns where a step's checkpoint is found.

        Raises:
          FileNotFoundError: There is none.
        """
        found = find(self.place(step)) if step in self.steps() else None
        if found is None:
            raise FileNotFoundError(
                f"{self.path}: expected a checkpoint of step {step}, got those of steps "
                f"{self.steps() or 'none'}."
            )
        return found

    def steps(self) -> list[int]:
        """Returns the steps of which there are checkpoints, in order."""
        if not os.path.isdir(self.path):
            return []
        found = set()
        for entry in os.scandir(self.path):
            name = entry.name.removesuffix(".functrain-old")
            if is_step(name) and entry.is_dir(follow_symlinks=False):
                found.add(int(name))
        return sorted(found)

    def require_writable(self) -> None:
        """Makes sure that nobody else writes here, and puts in order what a kill left.

        Raises:
          RuntimeError: Somebody does.
          OSError: The directory cannot be made, or written to.
        """
        if self._lock is not None:
            return
        os.makedirs(self.path, exist_ok=True)
        file = open(os.path.join(self.path, _LOCK), "a+", encoding="utf-8")  # noqa: SIM115
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                writer = file.read().strip() or "another process"
                file.close()
                raise RuntimeError(
                    f"{self.path}: expected to be the only one who writes here, but {writer} does. "
                    "Wait for its end, or take another directory."
                ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        self._lock = file
        _held.add(file)
        self._require_steps()
        tidy(self.path)

    def _require_steps(self) -> None:
        """Refuses names of steps that are no checkpoints' directories: links, files."""
        for entry in os.scandir(self.path):
            if is_step(entry.name) and not entry.is_dir(follow_symlinks=False):
                self.release()
                raise FileExistsError(
                    f"{entry.path}: expected a directory, got a "
                    f"{'symbolic link' if entry.is_symlink() else 'file'} under the name of a "
                    "step. Move it away."
                )

    def release(self) -> None:
        """Lets others write."""
        if self._lock is not None:
            _held.discard(self._lock)
            if fcntl is not None:  # a child may not have let go yet
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    def staged(self, step: int) -> str:
        """Returns where a step's checkpoint is written until it is whole."""
        return staged(self.place(step))

    def put(self, step: int) -> None:
        """Gives what is staged its name."""
        put(self.place(step))

    def remove(self, step: int) -> None:
        """Removes a step's checkpoint; a kill leaves it whole, or not under its name."""
        take_back(self.place(step))
        remove(self.place(step))

    def set_aside(self, step: int) -> None:
        """Takes a damaged checkpoint off the list; its files stay for whoever wants to look."""
        aside = os.path.join(self.path, _DAMAGED + os.path.basename(self.place(step)))
        remove(aside)
        with contextlib.suppress(OSError):
            os.rename(self.place(step), aside)

    def abouts(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields what the checkpoints say of themselves, but for damaged ones."""
        for step in self.steps():
            with contextlib.suppress(CheckpointCorruptError, OSError):
                yield step, read_about(find(self.place(step)) or self.place(step))


def best_of(values: dict[int, float], sign: float) -> int | None:
    """Returns the step with the best value, the first of equals; NaN is never best."""
    finite = {step: sign * x for step, x in values.items() if not math.isnan(x)}
    return min(sorted(finite), key=finite.__getitem__, default=None)
