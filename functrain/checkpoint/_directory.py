"""A directory with one checkpoint per step, such as `000000001200`."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from functrain.checkpoint import _processes
from functrain.checkpoint._checkpoint import delete_unneeded, read_current
from functrain.checkpoint._errors import CheckpointCorruptError, ObjectStoreError
from functrain.checkpoint._files import MANIFEST, files_at, is_step_name, steps_in
from functrain.checkpoint._manifest import read_manifest
from functrain.common import _direction
from functrain.common._checks import is_integer, require
from functrain.common._warnings import warn

_T = TypeVar("_T")


def steps(directory: str) -> list[int]:
    """Returns the steps that have a checkpoint, in ascending order."""
    return steps_in(files_at(directory).names(directory))


def path_of(directory: str, step: int) -> str:
    """Returns the path where the checkpoint of a step belongs."""
    expected = "an integer of at least 0, of at most twelve digits"
    require(is_integer(step, 0) and step < 10**12, "step", expected, step)
    return os.path.join(directory, f"{step:012d}")


def visible_steps(directory: str) -> list[int]:
    """Returns the steps that the first process sees, as soon as this one sees them as well."""
    if not _processes.is_multiprocess():
        return steps(directory)
    group = _processes.main_group
    first_steps: list[int]
    first_directory, first_steps = group.call_on_first(lambda: [directory, steps(directory)])
    with group.raise_in_all():
        _processes.require_same_path(directory, first_directory)
        is_visible = _processes.wait_until(lambda: set(first_steps) <= set(steps(directory)))
        expected = "a directory that all processes see"
        require(is_visible, directory, expected, "other steps than in process 0")
    return first_steps


def read_newest(directory: str, read: Callable[[str, dict[str, Any]], _T]) -> _T:
    """Reads the newest checkpoint that is not damaged. All processes call it, and read the same.

    Args:
      directory: The directory of a Checkpointer.
      read: Given the path of a checkpoint and its manifest, returns the result.

    Raises:
      FileNotFoundError: There is no checkpoint.
      CheckpointCorruptError: All of them are damaged.
      Exception: Any other error of `read`; an older checkpoint would not help.
    """
    damage: list[str] = []
    for step in reversed(visible_steps(directory)):
        path, results = path_of(directory, step), list[_T]()

        def find_damage(path: str = path, results: list[_T] = results) -> str:
            try:
                results.append(read_current(path, read))
            except CheckpointCorruptError as error:
                return str(error)
            return ""

        try:
            # All processes load the same checkpoint, or all pass over it.
            reasons = list(filter(None, _processes.main_group.gather(find_damage)))
        except FileNotFoundError:
            # A writer has removed it since the listing. Several processes would see that at
            # different times.
            if _processes.is_multiprocess():
                raise
            return read_newest(directory, read)
        if not reasons:
            for reason in damage:
                warn(f"Passed over, for step {step}: {reason}")
            return results[0]
        damage.append(reasons[0])
    if not damage:
        raise FileNotFoundError(f"{directory}: expected a checkpoint, got none. Check the path.")
    raise CheckpointCorruptError("\n".join([f"{directory}: all are damaged:", *damage]))


def read_each(
    paths: Iterable[str], read: Callable[[str], dict[str, Any]], *, skip_missing: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Returns the manifests of readable checkpoints, and the damage of the others, by path.

    With `skip_missing`, those that the writer has removed since the listing are left out.
    """
    manifests, damage = dict[str, dict[str, Any]](), dict[str, str]()
    for path in paths:
        try:
            manifests[path] = read(path)
        except CheckpointCorruptError as error:
            damage[path] = str(error)
        except FileNotFoundError:
            if not skip_missing:
                raise
    return manifests, damage


# For the writer of a directory.


def remove(directory: str, step: int) -> None:
    """Removes a checkpoint. A kill leaves it complete, or without its manifest."""
    path = path_of(directory, step)
    files_at(path).delete(path, [MANIFEST])
    delete_unneeded(path, "")


def remove_surplus(
    directory: str, keep: int, best: int | None, keep_every: int | None, kept_before: int | None
) -> None:
    """Removes all checkpoints but the best, the newest, and multiples of `keep_every`.

    The newest one of a step before `kept_before` stays as well, or that of this step.

    Warns if that fails: the new checkpoint is written.
    """
    saved_steps, kept = steps(directory), {best}
    if kept_before is not None:
        # The state after that step may already be NaN: the loss of a step is that before it.
        kept.add(max((step for step in saved_steps if step < kept_before), default=kept_before))
    for step in saved_steps[:-keep]:
        is_multiple = keep_every is not None and step % keep_every == 0
        if step not in kept and not is_multiple:
            try:
                remove(directory, step)
            except (OSError, ObjectStoreError) as error:
                path = path_of(directory, step)
                warn(f"{path}: expected to remove it, got {error}. The next save tries again.")


def set_aside(directory: str, step: int) -> None:
    """Renames a checkpoint, which is damaged."""
    files, new_path = files_at(directory), os.path.join(directory, f"damaged-{step:012d}")
    files.delete(new_path, list(files.names(new_path)))
    with contextlib.suppress(OSError):
        files.move(path_of(directory, step), new_path)


def for_later(act: Callable[[str, int], None], directory: str, step: int) -> None:
    """Calls `remove` or `set_aside` for the checkpoints of later steps."""
    # The last one first: a kill leaves no gap.
    for later_step in reversed(steps(directory)):
        if later_step > step:
            act(directory, later_step)


def clean_up(directory: str) -> None:
    """Deletes arrays of steps that no manifest names: killed saves and removals left them."""
    files, endings_by_step = files_at(directory), dict[str, set[str]]()
    for name in files.names(directory):
        step, _, file = name.partition("/")
        if is_step_name(step):
            endings_by_step.setdefault(step, set()).add(file.rpartition("-")[2])
    for step, endings in endings_by_step.items():
        path = os.path.join(directory, step)
        if endings == {""}:
            files.delete(path, [])  # an empty folder
        elif MANIFEST not in endings:
            delete_unneeded(path, "")
        # Arrays of one save only: nothing was interrupted, and the manifest need not be read.
        elif len(endings) > 2:
            with contextlib.suppress(CheckpointCorruptError, ValueError):  # of another format
                delete_unneeded(path, read_manifest(path)["save_id"])


class Monitor:
    """The values of one name in the checkpoints of a directory. None monitors nothing."""

    def __init__(self, name: str | None, mode: _direction.Mode, directory: str) -> None:
        self._name, self._directory = name, directory
        self._sign = 1.0 if name is None else _direction.sign(name, mode)
        self._values: dict[int, float] = {}  # by step, as far as they have been saved or read

    def best(self) -> int | None:
        """Returns the step of the best value, the first of equal ones; None if there is none."""
        return min(self._ranked_values(), default=(0.0, None))[1]

    def is_improved(self, value: float) -> bool:
        """Returns True if a value is better than every saved one."""
        best, _ = min(self._ranked_values(), default=(math.inf, 0))
        return math.isfinite(value) and self._sign * value < best

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Stores the value of a checkpoint that has been written; NaN if it has none."""
        if self._name is not None:
            self._values[step] = values.get(self._name, math.nan)

    def _ranked_values(self) -> list[tuple[float, int]]:
        """Returns each finite value with its step. The best value is the smallest."""
        values = list[tuple[float, int]]()
        for step in steps(self._directory) if self._name is not None else ():
            # A damaged checkpoint has no value, and so is never best.
            with contextlib.suppress(CheckpointCorruptError, ValueError, OSError):
                if step not in self._values:
                    saved: Any = read_manifest(path_of(self._directory, step))["values"]
                    # The writer's thread may have stored a newer one in the meantime.
                    self._values.setdefault(step, saved.get(self._name, math.nan))
                # NaN and infinity would stay the best for ever.
                if math.isfinite(value := self._values[step]):
                    values.append((self._sign * value, step))
        return values
