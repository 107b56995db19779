"""What several processes agree on: one does, all know how it went.

Everything here is a collective: all processes call it in the same order, in the thread that runs
their programs. With one process it is a plain call.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


def are_several() -> bool:
    """Whether this is one of several processes."""
    return bool(jax.process_count() > 1)


def is_first() -> bool:
    """Whether this is the one that does what only one may do."""
    return bool(jax.process_index() == 0)


def on_first(work: Callable[[], Any]) -> Any:
    """Has the first process do something; returns in all of them what it returned there.

    Args:
      work: Returns what JSON has.

    Raises:
      Exception: What it raised; in the other processes a RuntimeError that says so.
    """
    if not are_several():
        return work()
    failure: Exception | None = None
    result: dict[str, Any] = {}
    if is_first():
        try:
            result = {"found": work()}
        except Exception as error:
            failure, result = error, {"error": f"{type(error).__name__}: {error}"}
    result = json.loads(_from_first(json.dumps(result).encode()))
    if failure is not None:
        raise failure
    if "error" in result:
        raise RuntimeError(f"the first of the processes failed: {result['error']}")
    return result["found"]


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


def _from_first(data: bytes) -> bytes:
    from jax.experimental import multihost_utils

    size = int(multihost_utils.broadcast_one_to_all(np.asarray(len(data), np.int32)))
    sent = np.frombuffer(data, np.uint8) if is_first() else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(sent)).astype(np.uint8).tobytes()
