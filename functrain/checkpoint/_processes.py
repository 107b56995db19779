"""What several processes agree on: one does, all know how it went.

Everything here is a collective: all processes call it in the same order, in the thread that runs
their programs. With one process it is a plain call.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from functrain.common._gather import of_each_process


def are_several() -> bool:
    """Whether this is one of several processes."""
    return bool(jax.process_count() > 1)


def is_first() -> bool:
    """Whether this is the one that does what only one may do."""
    return bool(jax.process_index() == 0)


def on_first(work: Callable[[], Any]) -> Any:
    """Has the first process do something; returns in all of them what it returned there.

    Args:
      work: Returns something small.

    Raises:
      Exception: What it raised; in the other processes a RuntimeError that says so.
    """
    if not are_several():
        return work()
    failure: Exception | None = None
    found, reason = None, ""
    if is_first():
        try:
            found = work()
        except Exception as error:
            failure, reason = error, f"{type(error).__name__}: {error}"
    found, reason = of_each_process((found, reason))[0]
    if failure is not None:
        raise failure
    if reason:
        raise RuntimeError(f"the first of the processes failed: {reason}")
    return found


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Has what fails in one process within it fail in all: nobody goes on to wait for that one.

    Raises:
      Exception: What was raised within; in the other processes a RuntimeError that says so.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = those_with(failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(f"process {failed[0]} failed: see what it says")


def those_with(own: bool) -> list[int]:
    """Returns the numbers of the processes in which something is so."""
    if not are_several():
        return [0] if own else []
    from jax.experimental import multihost_utils

    found = multihost_utils.process_allgather(np.asarray(own, np.int32))
    return [int(n) for n in np.flatnonzero(np.asarray(found))]
