"""How a process ends that failed, while the others wait for it.

At its exit JAX waits until all processes have come to theirs: five minutes, if they wait for this
one in the midst of a computation. Here a process that failed ends within seconds, as soon as the
functions registered with `atexit` have run, and leaves its exit status to the others, who end with
the same. A process that did not fail waits for the others as before, but not for one that failed.
"""

import atexit
import contextlib
import dis
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from functrain.distributed import _coordination
from functrain.distributed._jax_private import do_not_wait_at_exit

_LOOK = 0.05  # seconds between two looks at the notes of the others
_TOGETHER = 3.0  # seconds for the others to end as well
_COORDINATOR = 7.0  # the same, of the process with the service: without it JAX aborts the others
_AFTER_SUCCESS = 60.0  # seconds in which the failure of another ends a process that did not fail
_EXIT_FUNCTIONS = 5.0  # seconds for the functions that were registered with atexit
_FAILED, _ENDED, _GONE = "functrain/failed", "functrain/ended", "functrain/gone"

_is_ending = False


def end_soon_after_a_failure(before: Callable[[], None]) -> None:
    """Has an uncaught exception, or `sys.exit` with another status than 0, end all processes.

    Args:
      before: Called when this process comes to its end, before it waits for the others.
    """
    ending = _Ending(before)
    _limit()
    sys.excepthook = ending.noting_exceptions(sys.excepthook)
    # SystemExit does not reach the excepthook, and no public name tells the status at exit.
    sys.exit = ending.noting_status(sys.exit)
    # Called before the functions of atexit, of which `end` is to be the first: it runs the others.
    threading._register_atexit(lambda: atexit.register(ending.end))  # type: ignore[attr-defined]


def fail(status: int) -> NoReturn:
    """Ends this process, and tells the others to end with the same status.

    The first process that fails decides on the status. Any thread may call it: the main thread may
    be waiting for a program that never ends.
    """
    global _is_ending
    _is_ending = True
    with contextlib.suppress(RuntimeError):  # the service is gone, or another was the first
        _coordination.put(f"{_FAILED}/first", status)
    with contextlib.suppress(RuntimeError):
        status = int(_coordination.read(_FAILED)["first"])
    with contextlib.suppress(RuntimeError):  # too late to start a thread
        _limit().put(status)
    do_not_wait_at_exit()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(RuntimeError):
        _end_together()
    os._exit(status)


@functools.cache
def _limit() -> queue.SimpleQueue[int]:
    """Returns a queue; a status that is put there ends the process a little later.

    Python 3.12 starts no thread once the interpreter shuts down, so this one waits from early on.
    """
    statuses: queue.SimpleQueue[int] = queue.SimpleQueue()

    def end() -> None:
        status = statuses.get()
        time.sleep(_EXIT_FUNCTIONS + _COORDINATOR)
        os._exit(status)

    threading.Thread(target=end, daemon=True).start()
    return statuses


def _end_together() -> None:
    """Waits until the others end, too; the process with the service waits for the longest."""
    own = _coordination.process_id()
    _note_end()
    seconds = _TOGETHER if own else _COORDINATOR
    _wait_until(lambda: len(_coordination.read(_ENDED)) == _coordination.process_count(), seconds)
    _coordination.put(f"{_GONE}/{own}", "")
    if own == 0:
        _wait_until(lambda: len(_coordination.read(_GONE)) == len(_coordination.read(_ENDED)), 1.0)


def _note_end() -> None:
    with contextlib.suppress(RuntimeError):  # noted before
        _coordination.put(f"{_ENDED}/{_coordination.process_id()}", "")


def _wait_until(is_so: Callable[[], Any], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(_LOOK)


class _Ending:
    """Finds out whether this process fails, and ends it accordingly."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._uncaught = 0  # the status of an exception that nobody caught
        self._asked = 0  # the status that sys.exit was last called with
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        self._outermost: FrameType = frame  # of the script, whose variables live on anyhow

    def noting_exceptions(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def note(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            hook(kind, error, trace)
            if not hasattr(sys, "ps1"):  # at a prompt one goes on
                self._uncaught = 130 if issubclass(kind, KeyboardInterrupt) else 1

        return note

    def noting_status(self, leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def leave_noted(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                is_number = isinstance(status, int)
                self._asked = status & 0xFF if is_number else int(status is not None)
            leave(status)

        return leave_noted

    @property
    def _status(self) -> int:
        """The exit status as far as it is known: 0 for SystemExit by another way than sys.exit."""
        last = dis.opname[self._outermost.f_code.co_code[self._outermost.f_lasti]]
        # A SystemExit that was caught: the script went on, and returned at its end.
        is_caught = last.startswith("RETURN")
        return self._uncaught or (0 if is_caught else self._asked)

    def end(self) -> None:
        """Ends this process at once if it failed or another did; else lets JAX wait."""
        if _is_ending or not _coordination.is_available():
            return
        self._before()
        if status := self._status:
            fail(status)
        try:
            _note_end()
            _wait_until(
                lambda: (
                    _coordination.read(_FAILED)
                    or len(_coordination.read(_ENDED)) == _coordination.process_count()
                ),
                _AFTER_SUCCESS,
            )
            is_failed = bool(_coordination.read(_FAILED))
        except RuntimeError:  # the service is gone: the process that ran it has failed
            is_failed = True
        if is_failed:
            fail(1)
