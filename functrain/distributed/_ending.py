"""The end of a process whose peers cannot continue, or without which they cannot.

At exit, JAX waits until all processes exit: for five minutes, if the others wait for this one
within a computation. So a thread in each process watches the others. When a process has failed, all
end within seconds. A process that did not fail waits for the others as before, but not for one that
failed.
"""

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from functrain.common._gather import seconds_of_waiting
from functrain.distributed import _coordination
from functrain.distributed._jax_private import do_not_wait_at_exit

# All in seconds.
_POLL_INTERVAL = 0.5
_FAILURE_GRACE = 2.0  # for this process to end by itself when another one has failed
_OWN_GRACE = 6.0  # for the functions registered with atexit when this one has failed
_PEER_TIMEOUT = 7.0  # for the others to exit before the process that runs the service
# A process that did not fail waits this long for the failure of another.
_SUCCESS_TIMEOUT = 60.0
# To wait for a process that has ended, or has left the run: its last messages may be under way.
LEAVE_TIMEOUT = 4.0
_FAILED, _ENDED, _GONE = "functrain/failed", "functrain/ended", "functrain/gone"

_own_status = 0  # of an uncaught exception
_is_exiting = False


@functools.cache
def watch_peers(before_exit: Callable[[], None]) -> None:
    """Begins to end all processes when one has failed. Later calls do nothing.

    Args:
      before_exit: Called when this process exits, before it waits for the others.
    """
    sys.excepthook = _fail_after(sys.excepthook)
    threading.Thread(target=_watch, name="functrain peers", daemon=True).start()

    # `_end` runs the functions of atexit, so it has to be the first of them: the last to be
    # registered. The private hook of threading is called just before atexit's functions.
    def register() -> None:
        atexit.register(_end)
        atexit.register(before_exit)

    threading._register_atexit(register)  # type: ignore[attr-defined]


def has_ended(process: int) -> bool:
    """Returns True if another process is exiting."""
    return str(process) in _coordination.read(_ENDED)


def exit_all(reason: str) -> NoReturn:
    """Prints why this process cannot continue, and ends all. Any thread may call it."""
    name = f"process {_coordination.process_id()}" if _coordination.is_available() else "the run"
    print(f"functrain: {name} {reason}", file=sys.stderr, flush=True)
    _post(_FAILED, "first")
    _exit(1)


def _fail_after(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an excepthook that ends all processes after another hook."""

    def print_and_fail(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        global _own_status
        hook(kind, error, trace)
        if not hasattr(sys, "ps1"):  # an error at a prompt does not end the session
            _own_status = 130 if issubclass(kind, KeyboardInterrupt) else 1
            _post(_FAILED, "first")

    return print_and_fail


def _watch() -> None:
    """Ends this process if another one has failed, or has ended while this one waits for it."""
    while not (failed := _read(_FAILED)):
        time.sleep(_POLL_INTERVAL)
        if seconds_of_waiting() > LEAVE_TIMEOUT and (ended := _read(_ENDED)):
            exit_all(
                f"waits for all processes, but process {min(ended)} has ended. Do the same in "
                "every process."
            )
    if _own_status:
        time.sleep(_OWN_GRACE)
        _exit(_own_status)
    time.sleep(_FAILURE_GRACE)
    own, first = _coordination.process_id(), failed["first"]
    print(f"functrain: process {own} ends, because process {first} failed", file=sys.stderr)
    _exit(1)


def _end() -> None:
    """Exits at once if this process failed, or if another fails while this one waits for it.

    Waits for a minute, and leaves further waiting to JAX. Called by atexit.
    """
    global _is_exiting
    if _is_exiting or not _coordination.is_available():
        return
    _is_exiting = True
    _post(_ENDED, _coordination.process_id())
    if not _own_status:
        # A RuntimeError means that the process that ran the service has failed.
        with contextlib.suppress(RuntimeError):
            _wait_until(
                lambda: _coordination.read(_FAILED) or _all_are_in(_ENDED), _SUCCESS_TIMEOUT
            )
            if not _coordination.read(_FAILED):
                return
    do_not_wait_at_exit()
    # JAX's client would wait for the others when the interpreter deletes it, so the interpreter
    # does not come to its end.
    atexit._run_exitfuncs()
    _exit(_own_status or 1)


def _exit(status: int) -> NoReturn:
    """Exits at once; the process that runs the service exits last."""
    # JAX aborts the processes that are left when the service ends.
    process = _coordination.process_id()
    _post(_GONE, process)
    if process == 0 and _coordination.is_available():
        _wait_until(lambda: _all_are_in(_GONE), _PEER_TIMEOUT)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


# A RuntimeError means that the service has ended, or that the key has been written already.


def _post(folder: str, name: object) -> None:
    with contextlib.suppress(RuntimeError):
        _coordination.put(f"{folder}/{name}", _coordination.process_id())


def _read(folder: str) -> dict[str, str]:
    with contextlib.suppress(RuntimeError):
        return _coordination.read(folder)
    return {}


def _all_are_in(folder: str) -> bool:
    return len(_read(folder)) == _coordination.process_count()


def _wait_until(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL / 10)
