"""A thread for one save at a time, which loses no error."""

import atexit
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent import futures


class Writer:
    """Runs one task at a time in a thread. The next `wait` raises its error.

    The interpreter exits only when the task has ended, so a script may end during a save.
    """

    def __init__(self) -> None:
        self._task: futures.Future[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, work: Callable[[], None]) -> None:
        """Starts a task. The previous one has been waited for."""

        def run() -> None:
            self._thread = threading.current_thread()
            work()

        # The interpreter waits at exit for the threads of executors, even after a shutdown.
        executor = futures.ThreadPoolExecutor(1, "functrain checkpoint")
        self._task = executor.submit(run)
        executor.shutdown(wait=False)
        _unfinished.add(self)

    def wait(self) -> None:
        """Waits for the current task, and raises its error."""
        task = self._task
        # The garbage collector may close an abandoned run in the writer's thread, which must not
        # wait for itself.
        if task is None or threading.current_thread() is self._thread:
            return
        futures.wait([task])
        if self._task is task:  # otherwise another thread has waited, and started the next one
            self._task = self._thread = None
            _unfinished.discard(self)
        task.result()


_unfinished: set[Writer] = set()


@atexit.register  # runs after the threads of executors have ended
def _report_failures() -> None:
    """Prints the errors of saves whose `wait` was never called."""
    for writer in list(_unfinished):
        try:
            writer.wait()
        except BaseException:
            print("functrain: a checkpoint could not be written:", file=sys.stderr)
            traceback.print_exc()
