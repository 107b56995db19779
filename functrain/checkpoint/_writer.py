"""A thread for one save at a time, which loses no error."""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent import futures


class Writer:
    """Runs one task at a time in a thread. The next `wait` raises its error.

    The interpreter exits only when the task has ended, so a script may end during a save. A forked
    child does not wait for the tasks of its parent, because it does not have their threads.
    """

    def __init__(self) -> None:
        self._task: futures.Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._process = 0

    @property
    def is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, work: Callable[[], None]) -> None:
        """Starts a task. The previous one has been waited for."""
        task: futures.Future[None] = futures.Future()

        def run() -> None:
            if task.set_running_or_notify_cancel():
                try:
                    work()
                    task.set_result(None)
                except BaseException as error:
                    task.set_exception(error)

        # Not the thread of an executor, which would never end if Ctrl-C interrupted its start. The
        # interpreter waits at exit for threads that are not daemons.
        thread = threading.Thread(target=run, name="functrain checkpoint", daemon=False)
        self._task, self._thread, self._process = task, thread, os.getpid()
        _tasks.add(task)
        try:
            thread.start()
        except BaseException:  # the system has no more threads, or Ctrl-C
            if task.cancel():  # it has not begun, and will not
                self._task = None
                _tasks.discard(task)
            raise

    def wait(self) -> None:
        """Waits for the current task, and raises its error."""
        task = self._task
        # The garbage collector may close an abandoned run in the writer's thread, which must not
        # wait for itself.
        is_own = threading.current_thread() is self._thread
        if task is None or is_own or os.getpid() != self._process:
            return
        # Not `Thread.join`: Python 3.11 takes a thread for ended if Ctrl-C interrupts that.
        futures.wait([task])
        if self._task is task:  # otherwise another thread has waited, and started the next one
            self._task = None
            _tasks.discard(task)
        task.result()


_tasks: set[futures.Future[None]] = set()  # that nobody has waited for


@atexit.register  # runs after the interpreter has waited for the threads
def _report_failures() -> None:
    """Prints the errors of saves whose `wait` was never called."""
    for task in _tasks:
        if task.done() and (error := task.exception()):  # in a forked child, none is done
            print("functrain: a checkpoint could not be written:", file=sys.stderr)
            traceback.print_exception(error)
