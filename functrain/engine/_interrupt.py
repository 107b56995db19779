"""Ctrl-C that loses nothing."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Holds the first Ctrl-C back, and yields a function that tells whether there was one.

    An interrupt may come between a program taking over the state's buffers and the new state
    having a name, and then both are lost. A second Ctrl-C acts at once. Does nothing outside the
    main thread, or where somebody else handles the signal.
    """
    pending = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            signal.default_int_handler(number, frame)
        pending = True

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, hold)
    try:
        yield lambda: pending
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:  # it came after the last time anybody asked
        raise KeyboardInterrupt
