"""The checkpoints of one training: a directory with one for each step, and one writer."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

from functrain.checkpoint._about import is_ours, is_step, read_about
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._lock import Lock
from functrain.checkpoint._place import find, local, make_directory, remove, take_back, tidy

_LOCK, _DAMAGED = ".functrain-lock", "damaged-"


class Directory:
    """Directories by step, `000000001200`: only whole ones have such a name.

    Args:
      path: Where they are. Made when something is written.

    Attributes:
      lock: The one writer's.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local(path, "directory")
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise FileExistsError(
                f"{self.path}: expected a directory for checkpoints, got a file. Choose another."
            )
        self.lock = Lock(os.path.join(self.path, _LOCK))

    def place(self, step: int) -> str:
        """Returns where a step's checkpoint stands."""
        return os.path.join(self.path, f"{step:012d}")

    def at(self, step: int) -> str:
        """Returns where a step's checkpoint is found.

        Raises:
          FileNotFoundError: There is none.
        """
        steps = self.steps()
        if step not in steps:
            raise FileNotFoundError(
                f"{self.path}: expected a checkpoint of step {step}, got those of steps "
                f"{steps or 'none'}."
            )
        return find(self.place(step))

    def steps(self) -> list[int]:
        """Returns the steps of which there are checkpoints, in order."""
        if not os.path.isdir(self.path):
            return []
        found = {
            int(name)
            for entry in list(os.scandir(self.path))
            if is_step(name := entry.name.removesuffix(".functrain-old"))
            and entry.is_dir(follow_symlinks=False)
            and is_ours(entry.path)
        }
        return sorted(found)

    def require_writable(self) -> None:
        """Makes sure that nobody else writes here, and puts in order what a kill left.

        Raises:
          RuntimeError: Somebody does.
          OSError: The directory cannot be made, or written to.
        """
        if self.lock.is_held():
            return
        make_directory(self.path, "directory")
        self.lock.acquire()
        try:
            self._require_steps()
            tidy(self.path)
        except BaseException:
            self.lock.release()
            raise

    def _require_steps(self) -> None:
        """Refuses names of steps that are no checkpoints: links, files, another program's."""
        for entry in list(os.scandir(self.path)):
            if not is_step(entry.name):
                continue
            plain = entry.is_dir(follow_symlinks=False)
            if not plain or (os.listdir(entry.path) and not is_ours(entry.path)):
                other = "symbolic link" if entry.is_symlink() else "file"
                kind = "directory of something else" if plain else other
                raise FileExistsError(
                    f"{entry.path}: expected a checkpoint, got a {kind} under the name of a step. "
                    "Move it away."
                )

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
            with contextlib.suppress(CheckpointCorruptError, CheckpointMismatchError, OSError):
                yield step, read_about(find(self.place(step)))


def best_of(values: dict[int, float], sign: float) -> int | None:
    """Returns the step with the best value, the first of equals; NaN is never best."""
    finite = {step: sign * x for step, x in values.items() if not math.isnan(x)}
    return min(sorted(finite), key=finite.__getitem__, default=None)
