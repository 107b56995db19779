"""New checkpoints of a directory, for an evaluation in another process than the training."""

import contextlib
import os
import time
from collections.abc import Iterator

from functrain.checkpoint import _processes
from functrain.checkpoint._directory import path_of, steps
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._files import resolve_path
from functrain.checkpoint._manifest import read_manifest


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
    path = resolve_path(directory, "directory")
    last_step, last_time = -1 if after is None else after, time.monotonic()

    def look() -> tuple[int | None, bool]:
        is_late = timeout is not None and time.monotonic() - last_time > timeout
        is_over = is_late or _is_finished(path)
        # Looked up last: a checkpoint may have come in the meantime.
        return min((step for step in steps(path) if step > last_step), default=None), is_over

    while True:
        # The first process decides for all: they would see a checkpoint at different times.
        step, is_over = _processes.main_group.call_on_first(look)
        if step is not None:
            yield path_of(path, step)
            last_step, last_time = step, time.monotonic()
        elif is_over:
            return
        else:
            time.sleep(interval)


def _is_finished(directory: str) -> bool:
    """Returns True if the last checkpoint is that of a run that has finished."""
    # It may be damaged, or replaced while it is read.
    with contextlib.suppress(CheckpointCorruptError, CheckpointMismatchError, OSError):
        for step in steps(directory)[-1:]:
            return read_manifest(path_of(directory, step)).get("done") is not None
    return False
