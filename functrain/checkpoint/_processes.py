"""What the processes of one run (`jax.distributed`) do together.

Each leaves a note of how it went, and waits at a barrier until all have. Who fails comes to the
barrier at once, so nobody waits for it.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

_PATIENCE = 3600.0  # seconds to wait for slower disks; JAX's heartbeat finds who was killed
_LOOK = 1.0  # seconds between two looks at whether another process has failed
_SEEN = 60.0  # seconds after which a disk on a network shows to one machine what another wrote


def are_several() -> bool:
    """Returns True if this is one of several processes."""
    return bool(jax.process_count() > 1)


def is_first() -> bool:
    """Returns True in the process that does what only one may do."""
    return bool(jax.process_index() == 0)


class OtherProcessError(RuntimeError):
    """Another process failed in what all were doing together; the message says how."""


class Together:
    """A sequence of things that all processes do in the same order, such as the parts of a save.

    Where there is one process, everything here is a plain call. No program runs on a device, so
    any thread may use it.

    Args:
      name: The same in all processes, and another for each sequence.
    """

    def __init__(self, name: str) -> None:
        self._name, self._round, self._next_look = name, 0, 0.0

    def all_do(self, work: Callable[[], Any], *, only_first: bool = False) -> list[Any]:
        """Has every process do something; returns what it returned in each, as JSON has it.

        Args:
          work: What to do.
          only_first: Whether to return [] in all processes but the first.

        Raises:
          Exception: What it raised here; or an OtherProcessError, if it raised elsewhere.
        """
        if not are_several():
            return [work()]
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        _raise(failure, self.failures(failure, value))
        texts = {} if only_first and not is_first() else self._notes("value", self._round - 1)
        return [json.loads(text) for text in texts.values()]

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Has the first process do something; returns in all what it returned there."""
        return self.all_do(lambda: work() if is_first() else None)[0]

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raises in all processes what is raised within it in one."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        _raise(failure, self.failures(failure))

    def failures(self, failure: Exception | None, value: Any = None) -> dict[int, str]:
        """Waits until all processes have come here; returns what failed in which, in words."""
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        if are_several():
            from orbax.checkpoint import multihost

            client, process = multihost.get_jax_distributed_client(), jax.process_index()
            client.key_value_set(f"{self._folder('value')}{process}", json.dumps(value))
            client.key_value_set(f"{self._folder('failure')}{process}", text)
            barrier = multihost.get_barrier_sync_fn()
            barrier(key=self._folder("barrier"), timeout_ms=int(1000 * _PATIENCE))
            notes = self._notes("failure", self._round)
            if self._round and is_first():  # all have read the notes of the round before
                client.key_value_delete(f"functrain/{self._name}/{self._round - 1}/")
            self._round += 1
        else:
            notes = {0: text}
        return {process: note for process, note in notes.items() if note}

    def require_no_failure(self) -> None:
        """Raises an OtherProcessError if another process has failed in what all are doing now.

        It looks once a second: call it as often as you like in what may take long.
        """
        if are_several() and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK
            notes = self._notes("failure", self._round)
            _raise(None, {process: note for process, note in notes.items() if note})

    def _notes(self, kind: str, number: int) -> dict[int, str]:
        """Returns the notes that processes have left so far, in their order."""
        from orbax.checkpoint import multihost

        client = multihost.get_jax_distributed_client()
        notes = client.key_value_dir_get(f"functrain/{self._name}/{number}/{kind}/")
        return dict(sorted((int(key.rpartition("/")[2]), text) for key, text in notes))

    def _folder(self, kind: str) -> str:
        return f"functrain/{self._name}/{self._round}/{kind}/"


def _raise(failure: Exception | None, failures: Mapping[int, str]) -> None:
    if failure is not None:
        raise failure
    if failures:
        raise OtherProcessError(described(failures))


def described(failures: Mapping[int, str]) -> str:
    """Returns failures as a text."""
    return "\n".join(f"process {process} failed: {text}" for process, text in failures.items())


# What is done in the thread that runs a process's programs.
main = Together("main")
_numbers = itertools.count()


def together_for_saves() -> Together:
    """Returns what the saves of a Checkpointer need; all processes begin the first in one order."""
    return Together(f"saves-{next(_numbers)}")


def require_seen(path: str, first: str, is_seen: Callable[[], bool]) -> None:
    """Waits for a disk on a network to show what the first process wrote.

    Raises:
      ValueError: It does not; or the first has written to another path.
    """
    until = time.monotonic() + _SEEN
    while path != first or not is_seen():
        if path != first or time.monotonic() > until:
            raise ValueError(
                f"{path}: expected the same path and step in all processes, and a directory that "
                f"all of them see, got {first} in the first, of which process "
                f"{jax.process_index()} does not see the same."
            )
        time.sleep(0.1)
