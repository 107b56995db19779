"""Work in the background, of which nothing is lost in silence."""

import concurrent.futures.thread  # noqa: F401  its end at exit comes after ours
import sys
import threading
import traceback
from collections.abc import Callable


class Background:
    """One piece of work at a time, in a thread. What goes wrong is raised by the next `wait`.

    The interpreter does not end before the work has: a script may end with a save under way.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._done.set()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether work is under way."""
        return not self._done.is_set()

    def start(self, work: Callable[[], None]) -> None:
        """Begins a piece of work; the one before it has been waited for."""

        def act() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error
            finally:
                self._done.set()

        self._done.clear()
        _unfinished.add(self)
        self._thread = threading.Thread(target=act, name="functrain checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the work under way, and raises what went wrong."""
        if threading.current_thread() is self._thread:  # the garbage collector came by in it
            return
        # Not by `Thread.join`: after Ctrl-C in it a thread counts as ended (Python 3.11, 3.12).
        self._done.wait()
        _unfinished.discard(self)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


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
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_finish)
else:
    import atexit

    atexit.register(_finish)
