"""The processes of a run agree on the event after which it stops.

Each counts the events at which a run can stop. A process that is to stop at one leaves a note with
its number, and waits; every other answers with the number of the first event at which it can still
stop. All go on to the largest of these numbers, and stop there. Where all processes stop at the
same event, as hooks do that see the same values, nobody goes a step further.

The answers come from a thread, since the thread that trains may be waiting for the program that the
stopping process has not begun yet. So training itself costs nothing: no program, no message.
"""

import contextlib
import itertools
import math
import sys
import threading
import time
import weakref
from typing import Self

from functrain.distributed import _coordination, _ending

_LOOK = 0.5  # seconds between two looks at the notes of the others
_LOOK_SOON = 0.01  # seconds, while an answer is waited for
_PATIENCE = 4.0  # seconds to leave a run in which another process takes no part any more

_numbers = itertools.count()  # the same number in all processes, which begin the same runs
_open: "weakref.WeakSet[StopAgreement]" = weakref.WeakSet()


class StopAgreement:
    """Context manager of a run of several processes, in which they agree on its last event.

    It also ends this process if another has left the run, and this one waits for it.

    Attributes:
      begun: Steps of all programs that this process has begun to dispatch.
      dispatched: Steps of all programs that it has dispatched.
    """

    def __init__(self) -> None:
        self.begun = self.dispatched = 0
        self._passed = 0  # events after which this process has not stopped
        self._answer: int | None = None  # the event at which it can stop
        self._last: float | None = None  # the event at which all stop
        # Reentrant: the garbage collector may close an abandoned run within any of these methods.
        self._lock = threading.RLock()
        self._is_closed = threading.Event()

    def __enter__(self) -> Self:
        """Begins to answer the others."""
        number = next(_numbers)
        self._folder = f"functrain/run-{number}"
        _open.add(self)
        threading.Thread(target=self._answer_others, daemon=True).start()
        if (
            _coordination.process_id() == 0 and number > 1
        ):  # all processes have begun the one before
            _coordination.remove(f"functrain/run-{number - 2}")
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the run."""
        self.close()

    def close(self) -> None:
        """Leaves the run: tells the others how many steps this process has taken part in."""
        with self._lock:
            if self._is_closed.is_set():
                return
            self._is_closed.set()
        _open.discard(self)
        with contextlib.suppress(RuntimeError):  # the service is gone
            _coordination.put(f"{self._folder}/left-{_coordination.process_id()}", self.dispatched)

    def is_last(self, is_to_stop: bool) -> bool:
        """Returns True if all processes stop after this event; each of them asks after each event.

        Args:
          is_to_stop: Whether this process wants to stop here.
        """
        with self._lock:
            event = self._passed + 1
            if is_to_stop and self._answer is None:
                self._give_answer(event)
            if self._answer is None:
                self._passed = event
                return False
        if self._last is None:
            self._last = self._wait_for_answers()
        with self._lock:
            self._passed = event
        return event >= self._last

    def _wait_for_answers(self) -> float:
        """Returns the largest of the answers; of a process that came to the end, infinity."""
        pause = _LOOK_SOON
        while True:
            stops, left = self._read()
            if len(stops.keys() | left.keys()) == _coordination.process_count():
                return max([*stops.values(), *(math.inf for number in left.keys() - stops.keys())])
            time.sleep(pause)
            pause = min(2 * pause, _LOOK)

    def _read(self) -> tuple[dict[int, int], dict[int, int]]:
        """Returns the answers, and the steps of those who left, by process."""
        stops: dict[int, int] = {}
        left: dict[int, int] = {}
        for name, text in _coordination.read(self._folder).items():
            kind, _, process = name.partition("-")
            {"stop": stops, "left": left}[kind][int(process)] = int(text)
        return stops, left

    def _give_answer(self, event: int) -> None:
        _coordination.put(f"{self._folder}/stop-{_coordination.process_id()}", event)
        self._answer = event

    def _answer_others(self) -> None:
        """Answers a process that is to stop, and ends this one if it waits in vain for another."""
        while not self._is_closed.wait(_LOOK):
            # The service may fail to answer once; where it is gone, JAX ends the process.
            with contextlib.suppress(RuntimeError):
                stops, left = self._read()
                with self._lock:
                    if stops and self._answer is None and not self._is_closed.is_set():
                        self._give_answer(self._passed + 1)
                behind = {process: steps for process, steps in left.items() if steps < self.begun}
                if behind and not self._is_closed.wait(_PATIENCE):
                    self._end(behind)

    def _end(self, behind: dict[int, int]) -> None:
        who = ", ".join(f"process {i} after {steps} steps" for i, steps in sorted(behind.items()))
        print(
            f"functrain: process {_coordination.process_id()} waits for a program in which not all "
            f"take part: the run was left by {who}, and here {self.begun} were begun. Do the same "
            "in every process: stop a run with event.stop(), and give each as many batches.",
            file=sys.stderr,
            flush=True,
        )
        _ending.fail(1)


def agreement(is_shared: bool) -> StopAgreement | None:
    """Returns the agreement for a run that processes share, or None for another."""
    return StopAgreement() if is_shared and _coordination.is_available() else None


def leave_runs() -> None:
    """Leaves all runs that are still open, as at the end of the process."""
    for run in list(_open):
        run.close()
