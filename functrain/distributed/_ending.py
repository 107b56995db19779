"""How a process ends that failed, while the others wait for it."""

import atexit
import logging
import os
import sys
from types import TracebackType

import jax


def end_at_once_after_an_error() -> None:
    """Has an exception that nobody catches end this process, and not wait for the others.

    At exit JAX waits for the others to come to their end as well: five minutes, if they wait for
    this one in the midst of a computation. Only then would it be seen that it failed. What was
    registered with `atexit` later than this is done before.
    """
    before = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if issubclass(kind, Exception) and not hasattr(sys, "ps1"):  # at a prompt one goes on
            failed.append(kind)

    def leave() -> None:
        if failed and jax.distributed.is_initialized():
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    failed: list[type[BaseException]] = []
    sys.excepthook = note
    atexit.register(leave)
