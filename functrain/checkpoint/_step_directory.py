"""A directory with one checkpoint per step, such as `000000001200`, and with one writer."""

import contextlib
import functools
import math
import os
from collections.abc import Mapping
from typing import Any

from functrain.checkpoint import _manifest, _storage
from functrain.checkpoint._errors import CheckpointCorruptError, ObjectStoreError
from functrain.checkpoint._local import is_step_name
from functrain.checkpoint._remote import files_at, resolve_path
from functrain.common import _direction
from functrain.common._checks import require
from functrain.common._warnings import warn

_DAMAGED = "damaged-"


class StepDirectory:
    """The checkpoints in a directory. Only complete ones have the names of steps."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = resolve_path(path, "directory")
        self._files = files_at(self.path)
        self._files.require_directory(self.path)
        self._lock = self._files.lock(self.path)

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in ascending order."""
        return self._files.steps(self.path)

    def target(self, step: int) -> str:
        """Returns the path where the checkpoint of a step belongs."""
        return os.path.join(self.path, f"{step:012d}")

    def new_target(self, step: int) -> str:
        """Returns the path of a new checkpoint; raises ValueError if it would not be found."""
        target = self.target(step)
        is_found = is_step_name(os.path.basename(target))
        require(is_found, self.path, "a step of at most twelve digits", step)
        return target

    def find(self, step: int) -> str:
        """Returns the path of an existing checkpoint; raises FileNotFoundError if there is none."""
        steps = self.steps()
        expected = f"one of the steps that have a checkpoint, {steps}"
        require(step in steps, self.path, expected, step, error=FileNotFoundError)
        return self._files.find(self.target(step))

    def read_manifest(self, step: int) -> dict[str, Any]:
        """Returns the manifest of an existing checkpoint."""
        return _manifest.read_manifest(self._files.find(self.target(step)))

    def verify(self, step: int | None) -> dict[int, str]:
        """Verifies a checkpoint, or all; see `Checkpointer.verify`."""
        damage: dict[int, str] = {}
        for n in self.steps() if step is None else [step]:
            try:
                _storage.read_unless_replaced(self.target(n), functools.partial(self._verify, n))
            except CheckpointCorruptError as error:
                damage[n] = str(error)
            except FileNotFoundError:
                if step is not None:
                    raise
                # The writer has removed it since the listing.
        return damage

    def _verify(self, step: int) -> None:
        _storage.verify(self.find(step))

    def require_writable(self) -> None:
        """Creates and locks the directory, and cleans up what killed saves left.

        Raises RuntimeError if another checkpointer writes to it. Reading needs no lock.
        """
        if self.is_locked():
            return
        self._files.make_directory(self.path)
        self._lock.acquire()
        try:
            self._files.clean_up(self.path)
        except BaseException:
            self._lock.release()
            raise

    def is_locked(self) -> bool:
        """Returns True if this is the writer; raises RuntimeError if another has taken over."""
        return self._lock.is_held()

    def release(self) -> None:
        """Lets others write."""
        self._lock.release()

    def remove_surplus(
        self, keep: int, best: int | None, keep_every: int | None, kept_before: int | None
    ) -> None:
        """Removes all checkpoints but the best, the newest, and multiples of `keep_every`.

        The newest one of a step before `kept_before` stays as well, or that of this step.

        Warns if that fails: the new checkpoint is written.
        """
        steps = self.steps()
        kept = {best}
        if kept_before is not None:
            # The state after that step may already be NaN: the loss of a step is that before it.
            kept.add(max((step for step in steps if step < kept_before), default=kept_before))
        for step in steps[:-keep]:
            is_multiple = keep_every is not None and step % keep_every == 0
            if step not in kept and not is_multiple:
                try:
                    self._files.remove_step(self.target(step))
                except (OSError, ObjectStoreError) as error:
                    warn(
                        f"{self.target(step)}: expected to remove this old checkpoint, got "
                        f"{error}. It is kept, and the next save tries again."
                    )

    def remove_later(self, step: int) -> None:
        """Removes the checkpoints of later steps."""
        for later_step in self._later(step):
            self._files.remove_step(self.target(later_step))

    def set_aside_later(self, step: int) -> None:
        """Renames the checkpoints of later steps, which are damaged."""
        for later_step in self._later(step):
            new_path = os.path.join(self.path, f"{_DAMAGED}{later_step:012d}")
            self._files.set_aside(self.target(later_step), new_path)

    def _later(self, step: int) -> list[int]:
        """Returns the later steps, the last one first: a kill leaves no gap."""
        return [x for x in reversed(self.steps()) if x > step]


class Monitor:
    """The values of one name in the checkpoints of a directory. None monitors nothing."""

    def __init__(self, name: str | None, mode: _direction.Mode, directory: StepDirectory) -> None:
        self._name, self._directory = name, directory
        self._sign = 1.0 if name is None else _direction.sign(name, mode)
        self._values: dict[int, float] = {}  # by step, as far as they have been saved or read

    def best(self) -> int | None:
        """Returns the step of the best value; None if there is none."""
        return best_step(self._saved_values(), self._sign)

    def is_improved(self, values: Mapping[str, float]) -> bool:
        """Returns True if the value is among `values`, and better than every saved one."""
        value = values.get(self._name or "", math.nan)
        if not math.isfinite(value):
            return False
        saved = self._saved_values()
        best = best_step(saved, self._sign)
        return best is None or self._sign * value < self._sign * saved[best]

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Stores the value of a checkpoint that has been written; NaN if it has none."""
        if self._name is not None:
            self._values[step] = values.get(self._name, math.nan)

    def _saved_values(self) -> dict[int, float]:
        """Returns the values by step, NaN where none was saved."""
        if self._name is None:
            return {}
        values = {}
        for step in self._directory.steps():
            # A damaged checkpoint has no value, and so is never best.
            with contextlib.suppress(CheckpointCorruptError, ValueError, OSError):
                if step not in self._values:
                    saved = self._directory.read_manifest(step)["values"]
                    # The writer's thread may have stored a newer one in the meantime.
                    self._values.setdefault(step, saved.get(self._name, math.nan))
                values[step] = self._values[step]
        return values


def best_step(values: Mapping[int, float], sign: float) -> int | None:
    """Returns the step with the best value, the first of equal ones.

    NaN and infinity are never best: such a checkpoint would stay the best one for ever.

    `sign` is 1.0 if less is better, and -1.0 if more is better.
    """
    numbers = {step: sign * x for step, x in values.items() if math.isfinite(x)}
    return min(sorted(numbers), key=numbers.__getitem__, default=None)


def find_checkpoints(
    path: str | os.PathLike[str], expected: str, name: str = "directory"
) -> tuple[str, list[str]]:
    """Returns a real path, and the targets of checkpoints in it; or itself if there are none.

    The oldest comes first. A training may remove or replace them before they are read.
    """
    path = resolve_path(path, name)
    files = files_at(path)
    path = files.find(path, expected)
    if not files.is_directory(path):
        return path, [path]
    directory = StepDirectory(path)
    return path, list(map(directory.target, directory.steps())) or [path]
