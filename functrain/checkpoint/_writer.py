"""A thread for one save at a time, which loses no error."""

import atexit
import sys
import threading
import traceback
from collections.abc import Callable


class Writer:
    """Runs one task at a time in a thread. The next `wait` raises its error.

    The interpreter exits only when the task has ended, so a script may end during a save. A forked
    child does not wait for the tasks of its parent, because it does not have their threads.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Starts a task. The previous one has been waited for."""
        # Taken by the thread when it begins, or here if it will not.
        begun = threading.Lock()

        def run() -> None:
            if begun.acquire(blocking=False):
                try:
                    work()
                except BaseException as error:
                    self._error = error

        # Not the thread of an executor, which would never end if Ctrl-C interrupted its start. The
        # interpreter waits at exit for threads that are not daemons.
        self._thread = threading.Thread(target=run, name="functrain checkpoint", daemon=False)
        _unfinished.add(self)
        try:
            self._thread.start()
        except BaseException:  # the system has no more threads, or Ctrl-C
            if begun.acquire(blocking=False):
                self._thread = None
            raise

    def wait(self) -> None:
        """Waits for the current task, and raises its error."""
        thread = self._thread
        # The garbage collector may close an abandoned run in the writer's thread, which must not
        # wait for itself.
        if thread is None or thread is threading.current_thread():
            return
        thread.join()
        if self._thread is thread:  # otherwise another thread has waited, and started the next one
            self._thread = None
            _unfinished.discard(self)
            error, self._error = self._error, None
            if error is not None:
                raise error


_unfinished: set[Writer] = set()


@atexit.register  # runs after the interpreter has waited for the threads
def _report_failures() -> None:
    """Prints the errors of saves whose `wait` was never called."""
    for writer in list(_unfinished):
        try:
            writer.wait()
        except BaseException:
            print("functrain: a checkpoint could not be written:", file=sys.stderr)
            traceback.print_exc()
