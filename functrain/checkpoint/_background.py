"""Work in the background, of which nothing is lost in silence."""

import atexit
import concurrent.futures.thread  # noqa: F401  its end at exit comes after ours
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent import futures
from typing import Any


def threaded(
    work: Callable[[], Any], *, daemon: bool = False
) -> tuple[futures.Future[Any], threading.Thread]:
    """Returns a thread that will do a piece of work, and what comes of it."""
    future = futures.Future[Any]()
    pending = [work]

    def act() -> None:
        try:
            # The work refers to a state: its memory is free again before anybody has waited.
            result = pending.pop()()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    return future, threading.Thread(target=act, name="functrain checkpoint", daemon=daemon)


class Background:
    """One piece of work at a time, in a thread. What goes wrong is raised by the next `wait`.

    The interpreter does not end before the work has: a script may end with a save under way.
    """

    def __init__(self) -> None:
        self._work: futures.Future[Any] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether work is under way."""
        return self._work is not None and not self._work.done()

    def start(self, work: Callable[[], None]) -> None:
        """Begins a piece of work; the one before it has been waited for."""
        _unfinished.add(self)
        self._work, self._thread = threaded(work)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can begin: `wait` would wait forever
            self._work = None
            _unfinished.discard(self)
            raise

    def wait(self) -> None:
        """Waits for the work under way, and raises what went wrong."""
        work = self._work
        if work is None or threading.current_thread() is self._thread:
            return  # in its own thread the garbage collector came by
        # Not by `Thread.join`: after Ctrl-C in it a thread counts as ended (Python 3.11, 3.12).
        futures.wait([work])
        if self._work is work:  # else another thread has waited, too, and begun another
            self._work = None
            _unfinished.discard(self)
        work.result()


_unfinished: set[Background] = set()


def _finish() -> None:
    """Waits at the end of the interpreter, while threads can still begin: Orbax needs some."""
    for background in list(_unfinished):
        try:
            background.wait()
        except BaseException:
            print("functrain: a checkpoint could not be written:", file=sys.stderr)
            traceback.print_exc()


# `atexit` comes too late: no executor takes work any more (Python 3.11 to 3.14). Where this hook
# is gone, a save under way at the end fails, which `atexit` can at least say.
_register = getattr(threading, "_register_atexit", atexit.register)
_register(_finish)
