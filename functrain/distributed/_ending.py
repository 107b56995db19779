"""The exit of a process that has failed, while others wait for it.

At exit, JAX waits until all processes exit: for five minutes, if the others wait for this one
within a computation. Here a process that failed exits within seconds, as soon as the functions
registered with `atexit` have run, and the others exit with the same status. A process that did not
fail waits for the others as before, but not for one that failed.
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

# All in seconds.
_POLL_INTERVAL = 0.05
_PEER_TIMEOUT = 3.0  # for the other processes to exit as well
# The same for the process that runs the service. JAX aborts the others if it exits before them.
_COORDINATOR_TIMEOUT = 7.0
# A process that did not fail waits this long for the failure of another.
_SUCCESS_TIMEOUT = 60.0
_EXIT_FUNCTIONS_TIMEOUT = 5.0  # for the functions registered with atexit
_FAILED, _ENDED, _GONE = "functrain/failed", "functrain/ended", "functrain/gone"

_is_exiting = False


def exit_all_on_failure(before_exit: Callable[[], None]) -> None:
    """Makes an uncaught exception, or `sys.exit` with a status other than 0, end all processes.

    Args:
      before_exit: Called when this process exits, before it waits for the others.
    """
    monitor = _ExitMonitor(before_exit)
    _exit_timer()
    sys.excepthook = monitor.wrap_excepthook(sys.excepthook)
    # SystemExit does not reach the excepthook, and no public name tells the exit status.
    sys.exit = monitor.wrap_exit(sys.exit)
    # `end` runs the functions of atexit, so it has to be the first of them: the last to be
    # registered. The private hook of threading is called just before atexit's functions.
    threading._register_atexit(lambda: atexit.register(monitor.end))  # type: ignore[attr-defined]


def exit_all(status: int) -> NoReturn:
    """Exits this process, and makes the others exit with the same status.

    The first process that fails decides on the status. Any thread may call it, since the main
    thread may be waiting for a program that never ends.
    """
    global _is_exiting
    _is_exiting = True
    # A RuntimeError means that the service has ended, or that another process failed first.
    with contextlib.suppress(RuntimeError):
        _coordination.put(f"{_FAILED}/first", status)
    with contextlib.suppress(RuntimeError):
        status = int(_coordination.read(_FAILED)["first"])
    with contextlib.suppress(RuntimeError):  # it is too late to start a thread
        _exit_timer().put(status)
    do_not_wait_at_exit()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(RuntimeError):
        _wait_for_peers()
    os._exit(status)


@functools.cache
def _exit_timer() -> queue.SimpleQueue[int]:
    """Starts a thread that exits the process some seconds after a status is put into its queue.

    It is started early, because Python 3.12 starts no threads once the interpreter shuts down.
    """
    statuses: queue.SimpleQueue[int] = queue.SimpleQueue()

    def exit_later() -> None:
        status = statuses.get()
        time.sleep(_EXIT_FUNCTIONS_TIMEOUT + _COORDINATOR_TIMEOUT)
        os._exit(status)

    threading.Thread(target=exit_later, daemon=True).start()
    return statuses


def _wait_for_peers() -> None:
    """Waits until the others exit, too. The process that runs the service exits last."""
    process = _coordination.process_id()
    _post_end()
    _wait_until(_all_have_ended, _PEER_TIMEOUT if process else _COORDINATOR_TIMEOUT)
    _coordination.put(f"{_GONE}/{process}", "")
    if process == 0:
        _wait_until(lambda: len(_coordination.read(_GONE)) == len(_coordination.read(_ENDED)), 1.0)


def _post_end() -> None:
    with contextlib.suppress(RuntimeError):  # it is posted already
        _coordination.put(f"{_ENDED}/{_coordination.process_id()}", "")


def _all_have_ended() -> bool:
    return len(_coordination.read(_ENDED)) == _coordination.process_count()


def _wait_until(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)


class _ExitMonitor:
    """Records whether this process fails, and ends it accordingly."""

    def __init__(self, before_exit: Callable[[], None]) -> None:
        self._before_exit = before_exit
        self._exception_status = 0  # of an uncaught exception
        self._exit_status = 0  # of the last call of sys.exit
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        # Of the script. To keep it alive costs nothing, since its variables are global.
        self._outermost_frame: FrameType = frame

    def wrap_excepthook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def hook_and_record(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            hook(kind, error, trace)
            if not hasattr(sys, "ps1"):  # an error at a prompt does not end the session
                self._exception_status = 130 if issubclass(kind, KeyboardInterrupt) else 1

        return hook_and_record

    def wrap_exit(self, sys_exit: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def record_and_exit(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                is_number = isinstance(status, int)
                self._exit_status = status & 0xFF if is_number else int(status is not None)
            sys_exit(status)

        return record_and_exit

    @property
    def _status(self) -> int:
        """The exit status; 0 if a SystemExit was raised without sys.exit, which is not recorded."""
        code, offset = self._outermost_frame.f_code.co_code, self._outermost_frame.f_lasti
        # If the last instruction of the script is a return, the SystemExit was caught.
        is_caught = dis.opname[code[offset]].startswith("RETURN")
        return self._exception_status or (0 if is_caught else self._exit_status)

    def end(self) -> None:
        """Exits at once if this process failed, or if another fails while this one waits for it.

        Waits for a minute, and leaves further waiting to JAX. Called by atexit.
        """
        if _is_exiting or not _coordination.is_available():
            return
        self._before_exit()
        if self._status:
            exit_all(self._status)
        try:
            _post_end()
            _wait_until(lambda: _coordination.read(_FAILED) or _all_have_ended(), _SUCCESS_TIMEOUT)
            has_failed = bool(_coordination.read(_FAILED))
        except RuntimeError:  # the service has ended, because the process that ran it has failed
            has_failed = True
        if has_failed:
            exit_all(1)
