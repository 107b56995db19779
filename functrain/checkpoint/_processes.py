"""Coordination of the processes of one run (`jax.distributed`)."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from functrain.distributed import _coordination

# Long enough for the slowest disks. JAX's heartbeat detects a killed process much sooner.
_BARRIER_TIMEOUT = 3600.0  # seconds
_FAILURE_CHECK_INTERVAL = 1.0  # seconds
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
        self._name, self._round, self._next_check = name, 0, 0.0

    def gather(self, work: Callable[[], Any], *, only_first: bool = False) -> list[Any]:
        """Calls a function in every process, and returns all results, which have to be JSON.

        With `only_first`, the others get []. An exception in one process is raised in all.
        """
        if not is_multiprocess():
            return [work()]
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        _raise(failure, self.exchange_failures(failure, value))
        if only_first and not is_first():
            return []
        return list(map(json.loads, self._read("value", self._round - 1).values()))

    def call_on_first(self, work: Callable[[], Any]) -> Any:
        """Calls a function in the first process only, and returns its result in all of them."""
        return self.gather(lambda: work() if is_first() else None)[0]

    @contextlib.contextmanager
    def raise_in_all(self) -> Iterator[None]:
        """Context manager: an exception in one process is raised in all of them.

        Without it, the others would wait in the next collective for the process that failed.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        _raise(failure, self.exchange_failures(failure))

    def exchange_failures(self, failure: Exception | None, value: Any = None) -> dict[int, str]:
        """Waits for all processes, and returns the errors of those that failed, by process."""
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        if not is_multiprocess():
            return {0: text} if text else {}
        # Each process posts its outcome, and then waits at a barrier for the others. A process that
        # failed goes to the barrier at once, so the others never wait for work that it will not do.
        process = jax.process_index()
        _coordination.put(f"{self._folder('value', self._round)}/{process}", json.dumps(value))
        _coordination.put(f"{self._folder('failure', self._round)}/{process}", text)
        _coordination.wait_at_barrier(self._folder("barrier", self._round), _BARRIER_TIMEOUT)
        failures = self._read_failures()
        # Every process has read the round before, or it would not be at this barrier.
        if self._round and is_first():
            _coordination.remove(f"functrain/{self._name}/{self._round - 1}")
        self._round += 1
        return failures

    def require_no_failure(self) -> None:
        """Raises OtherProcessError if another process has already failed in the current work.

        It asks the service at most once a second, so call it freely within long work.
        """
        if is_multiprocess() and time.monotonic() > self._next_check:
            self._next_check = time.monotonic() + _FAILURE_CHECK_INTERVAL
            _raise(None, self._read_failures())

    def _read_failures(self) -> dict[int, str]:
        texts = self._read("failure", self._round)
        return {process: text for process, text in texts.items() if text}

    def _read(self, kind: str, number: int) -> dict[int, str]:
        """Returns the texts that processes have posted in a round so far, by process."""
        texts = _coordination.read(self._folder(kind, number))
        return {process: texts[str(process)] for process in sorted(map(int, texts))}

    def _folder(self, kind: str, number: int) -> str:
        return f"functrain/{self._name}/{number}/{kind}"


def _raise(failure: Exception | None, failures: Mapping[int, str]) -> None:
    if failure is not None:
        raise failure
    if failures:
        raise OtherProcessError(describe_failures(failures))


def describe_failures(failures: Mapping[int, str]) -> str:
    """Formats the errors of processes, one per line."""
    return "\n".join(f"process {process} failed: {text}" for process, text in failures.items())


# For work in the thread that dispatches the programs. Work in other threads needs its own groups,
# since their rounds would otherwise interleave differently in each process.
main_group = ProcessGroup("main")
_save_group_numbers = itertools.count()


def new_save_group() -> ProcessGroup:
    """Returns a group for the saves of one Checkpointer.

    All processes must begin their first saves in the same order: they match groups by number.
    """
    return ProcessGroup(f"saves-{next(_save_group_numbers)}")


def wait_until_visible(path: str, first_path: str, is_visible: Callable[[], bool]) -> None:
    """Waits until this process can see what the first process wrote to a network disk.

    Raises ValueError if that stays invisible, or the first process has written to another path.
    """
    deadline = time.monotonic() + _VISIBILITY_TIMEOUT
    while path != first_path or not is_visible():
        if path != first_path or time.monotonic() > deadline:
            raise ValueError(
                f"{path}: expected the same path and step in all processes, and a directory that "
                f"all of them can see, got {first_path} in process 0, and process "
                f"{jax.process_index()} does not see the same. Use one path on a shared disk."
            )
        time.sleep(0.1)
