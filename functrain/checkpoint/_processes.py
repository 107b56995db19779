"""Coordination of the processes of one run (`jax.distributed`)."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from functrain.common._checks import require
from functrain.distributed import _coordination
from functrain.distributed._stopping import LEAVE_TIMEOUT, why_missing

# Long enough for the slowest disks. JAX's heartbeat detects a killed process much sooner.
_TIMEOUT = 3600.0  # seconds
_PEER_CHECK_INTERVAL = 2.0  # seconds
# Network file systems cache directory listings: a file from another host can appear this late.
_VISIBILITY_TIMEOUT = 60.0  # seconds


def is_multiprocess() -> bool:
    """Returns True if this is one of several processes."""
    return bool(jax.process_count() > 1)


def is_first() -> bool:
    """Returns True in process 0, which does the work that only one process may do."""
    return bool(jax.process_index() == 0)


class OtherProcessError(RuntimeError):
    """Another process failed in work that all processes share. The message is its error."""


class ProcessGroup:
    """All processes, in one sequence of shared work, such as the parts of a save.

    In a single process every method is a plain call. Any thread may use a group, because no program
    runs on a device. The name is the same in all processes, and unique to a sequence.
    """

    def __init__(self, name: str) -> None:
        self._name, self._round = name, 0

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """Calls a function in every process, and returns all results, which have to be JSON.

        An exception in one process is raised in all.
        """
        with self._posted_failure():
            value = work()
        return self._exchange(None, value)

    def call_on_first(self, work: Callable[[], Any]) -> Any:
        """Calls a function in the first process only, and returns its result in all of them."""
        return self.gather(lambda: work() if is_first() else None)[0]

    @contextlib.contextmanager
    def raise_in_all(self) -> Iterator[None]:
        """Context manager: an exception in one process is raised in all of them.

        Without it, the others would wait in the next collective for the process that failed.
        """
        with self._posted_failure():
            yield
        self._exchange(None, None)

    @contextlib.contextmanager
    def _posted_failure(self) -> Iterator[None]:
        """Context manager: tells the others of an exception, and raises it."""
        try:
            yield
        except Exception as error:
            if is_multiprocess():
                self._exchange(error, None)
            raise

    def _exchange(self, failure: Exception | None, value: Any) -> list[Any]:
        """Waits for all processes, and returns their values; raises if one of them has failed."""
        if not is_multiprocess():
            return [value]
        # Each process posts its outcome: one that failed does so at once, so the others never wait
        # for work that it will not do. The first process collects the outcomes for all.
        process, folder = jax.process_index(), f"functrain/{self._name}/{self._round}"
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        _coordination.put(f"{folder}/{process}", json.dumps([text, value]))
        if process == 0:
            outcomes = [self._wait_for(folder, i, i) for i in range(jax.process_count())]
            texts, values = [text for text, _ in outcomes], [value for _, value in outcomes]
            _coordination.put(f"{folder}/all", json.dumps([texts, values]))
            # Every process has read the round before, or it would not have posted in this one.
            if self._round:
                _coordination.remove(f"functrain/{self._name}/{self._round - 1}")
        else:
            texts, values = self._wait_for(folder, "all", 0)
        self._round += 1
        if failure is not None:
            raise failure
        lines = [f"process {i} failed: {text}" for i, text in enumerate(texts) if text]
        if lines:
            raise OtherProcessError("\n".join(lines))
        return values

    def _wait_for(self, folder: str, name: object, process: int) -> Any:
        """Returns what another process posts; an error in its place if it will never post."""
        since, reason = time.monotonic(), ""
        while not reason:
            posted = _coordination.wait_for(f"{folder}/{name}", _PEER_CHECK_INTERVAL)
            if posted is not None:
                return json.loads(posted)
            waited = time.monotonic() - since
            # A save that has begun goes on in a thread after its run. The last message of a process
            # may be under way when it leaves.
            if self is main_group and waited > LEAVE_TIMEOUT:
                reason = why_missing(process)
            if waited > _TIMEOUT:
                reason = f"process {process} did not come within {_TIMEOUT:g} s"
        if process == 0:
            raise OtherProcessError(reason)
        return f"{OtherProcessError.__name__}: {reason}", None


# For work in the thread that dispatches the programs. Work in other threads needs its own groups,
# since their rounds would otherwise interleave differently in each process.
main_group = ProcessGroup("main")
_save_group_numbers = itertools.count()


def new_save_group() -> ProcessGroup:
    """Returns a group for the saves of one Checkpointer.

    All processes must begin their first saves in the same order: they match groups by number.
    """
    return ProcessGroup(f"saves-{next(_save_group_numbers)}")


def require_same_path(path: str, first_path: str) -> None:
    """Raises ValueError if the first process saves or loads another path."""
    expected = f"the same path and step in all processes, {first_path} as in process 0"
    advice = "Use one path on a disk that all processes see."
    require(path == first_path, path, expected, path, advice)


def wait_until(is_visible: Callable[[], bool]) -> bool:
    """Waits until this process sees what others wrote to a network disk; False if it never does."""
    deadline = time.monotonic() + _VISIBILITY_TIMEOUT
    while not is_visible():
        if not is_multiprocess() or time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
