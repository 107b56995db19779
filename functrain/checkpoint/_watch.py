"""New checkpoints of a directory, for an evaluation in another process than the training."""

import contextlib
import importlib
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from functrain.checkpoint import _processes
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._step_directory import StepDirectory
from functrain.common._checks import is_positive, require, require_integer


def watch_checkpoints(
    directory: str | os.PathLike[str],
    *,
    after: int | None = None,
    interval: float = 10.0,
    timeout: float | None = None,
) -> Iterator[str]:
    """Yields the path of each complete checkpoint in a directory, the oldest first, each once.

    Use it in another process than the training, for example to evaluate there. It waits for new
    checkpoints, and ends after the last one of a run that has finished. It writes nothing.
    Checkpoints that the training removes before their turn are left out: `keep=None` or
    `keep_every=` of the Checkpointer keeps them. A step that is saved again is not yielded again.

    If there are several processes (`jax.distributed`), all of them call it, and they are given the
    same paths.

    Args:
      directory: The directory of a `functrain.Checkpointer`, or its URL. It may not exist yet.
      after: Leaves out this step and earlier ones, such as those before a restart.
      interval: Seconds between two looks at the directory.
      timeout: Ends after this number of seconds without a new checkpoint; None waits.

    Yields:
      Paths for `functrain.load` and `functrain.warm_start`. The last part is the step.

    Raises:
      ValueError: An argument is invalid.
      RuntimeError: An object store refused the request or could not be reached.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with ft.Checkpointer(folder) as checkpoints:
      ...         for step in (10, 20, 30):
      ...             checkpoints.save({"w": jnp.full(2, step)}, step)
      ...     for path in watch_checkpoints(folder, after=10, timeout=0.1, interval=0.1):
      ...         print(path[-4:], ft.load(path, {"w": jnp.zeros(2, jnp.int32)})["w"])
      0020 [20 20]
      0030 [30 30]
    """
    if after is not None:
        require_integer("after", after, 0)
    require(is_positive(interval), "interval", "a positive number of seconds", interval)
    is_timeout = timeout is None or is_positive(timeout)
    require(is_timeout, "timeout", "a positive number of seconds, or None", timeout)
    return _watch(StepDirectory(directory), -1 if after is None else after, interval, timeout)


def _watch(
    directory: StepDirectory, last_step: int, interval: float, timeout: float | None
) -> Iterator[str]:
    last_time = time.monotonic()
    limit = math.inf if timeout is None else timeout
    while True:

        def look(last_step: int = last_step, last_time: float = last_time) -> Any:
            found = _next_checkpoint(directory, last_step)
            is_over = _is_finished(directory) or time.monotonic() - last_time > limit
            # A checkpoint may have come between the two.
            return found or (is_over and (_next_checkpoint(directory, last_step) or "end"))

        # The first process decides for all: they would see a checkpoint at different times.
        match _processes.main_group.call_on_first(look):
            case [last_step, path]:
                yield path
                last_time = time.monotonic()
            case "end":
                return
            case _:
                time.sleep(interval)


def _next_checkpoint(directory: StepDirectory, last_step: int) -> tuple[int, str] | None:
    """Returns step and path of the oldest checkpoint after a step."""
    for step in directory.steps():
        # The training may have removed it since the listing.
        with contextlib.suppress(FileNotFoundError):
            if step > last_step:
                directory.find(step)
                return step, directory.target(step)
    return None


def _is_finished(directory: StepDirectory) -> bool:
    """Returns True if the last checkpoint is that of a run that has finished."""
    # It may be damaged, or replaced while it is read.
    with contextlib.suppress(CheckpointCorruptError, CheckpointMismatchError, OSError):
        for step in directory.steps()[-1:]:
            return directory.read_manifest(step).get("done") is not None
    return False


# The command line.


def call_for_each(directory: str, function: str, progress: str | None, **options: Any) -> None:
    """Calls a function with the path of each checkpoint, as `watch_checkpoints` yields them.

    Args:
      directory: The directory of a Checkpointer.
      function: Its module and its name, such as ``"evaluate:main"``.
      progress: A file for the last step that is done, from which a restart continues.
      **options: For `watch_checkpoints`.
    """
    module, _, name = function.partition(":")
    expected = "a module and a function, such as 'evaluate:main'"
    require(module and name, "--watch", expected, function)
    call: Callable[[str], object] = getattr(importlib.import_module(module), name)
    require(callable(call), "--watch", "a function of a path", call)
    after, is_writer = None, _processes.is_first()
    if progress is not None and is_writer:
        # Before the first call, which may take hours.
        os.makedirs(os.path.dirname(os.path.abspath(progress)), exist_ok=True)
        open(f"{progress}.new", "w").close()
    if progress is not None:
        with contextlib.suppress(FileNotFoundError), open(progress, encoding="ascii") as file:
            after = int(file.read())
    for path in watch_checkpoints(directory, after=after, **options):
        call(path)
        if progress is not None and is_writer:
            # A kill leaves the old file or the new one.
            with open(f"{progress}.new", "w", encoding="ascii") as file:
                file.write(os.path.basename(path))
            os.replace(f"{progress}.new", progress)
