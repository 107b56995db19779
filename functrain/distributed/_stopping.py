"""Agreement of the processes of a run on the events at which it is saved, and stops.

Each process counts the events at which a run can stop. A process that wants to stop posts the
number of its event, and waits. Every other process answers with the number of the first event at
which it can still stop. All continue to the largest of these numbers, and stop there. If all
processes stop at the same event, as hooks do that see the same values, none takes an extra step.
For a save that only one process asks for, by its clock or a signal, they agree in the same way.
"""

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from typing import Self

import jax

from functrain.distributed import _coordination

# All in seconds.
_POLL_INTERVAL = 0.5
_ANSWER_INTERVAL = 0.05
# To wait for a process that has left the run: its last messages may be under way.
LEAVE_TIMEOUT = 4.0

# Processes start the same runs in the same order, so a run has the same number in all of them.
_run_numbers = itertools.count()
_open_runs: "set[StopAgreement]" = set()


class _Agreed:
    """An event that the processes agree on.

    Attributes:
      name: The name under which they post their answers.
      answer: The first event that suits this process; None as long as it was not asked.
      event: The event; None as long as they have not agreed, infinity if there will be none.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.answer: int | None = None
        self.event: float | None = None


class StopAgreement:
    """Context manager of a run of several processes, in which they agree on events.

    It also ends this process if another one has left the run while this one waits for it.

    Attributes:
      started: Steps of all programs whose dispatch this process has started.
      dispatched: Steps of all programs that this process has dispatched.
    """

    def __init__(self) -> None:
        self.started = self.dispatched = 0
        self._process = jax.process_index()
        self._passed_events = 0  # events after which this process has not stopped
        self._stop, self._save, self._saves = _Agreed("stop"), _Agreed("save-0"), 0
        # Reentrant: the garbage collector may close an abandoned run within any of these methods.
        self._lock = threading.RLock()
        self._is_closed = threading.Event()

    def __enter__(self) -> Self:
        """Starts to answer the other processes."""
        number = next(_run_numbers)
        self._folder = f"functrain/run-{number}"
        _open_runs.add(self)
        threading.Thread(target=self._answer_others, daemon=True).start()
        # All processes have started the run before this one, so they are done with the one
        # before that.
        if self._process == 0 and number > 1:
            _coordination.remove(f"functrain/run-{number - 2}")
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the run: tells the others how many steps this process has dispatched."""
        with self._lock:
            if self._is_closed.is_set():
                return
            self._is_closed.set()
        _open_runs.discard(self)
        with contextlib.suppress(RuntimeError):  # the service has ended
            self._post("left", self.dispatched)

    def is_last(self, wants_to_stop: bool) -> bool:
        """Returns True if all processes stop after this event. Each calls it after every event.

        Args:
          wants_to_stop: True if this process has a reason to stop here.
        """
        with self._lock:
            event = self._passed_events + 1
            if wants_to_stop:
                self._give_answer(self._stop, event)
            self._passed_events = event
        return self._has_come(self._stop)

    def is_save(self, wants_to_save: bool) -> bool:
        """Returns True if all processes save after this event. Each calls it after `is_last`.

        Args:
          wants_to_save: True if this process has a reason to save here.
        """
        with self._lock:
            if wants_to_save:
                self._give_answer(self._save, self._passed_events)
        has_come = self._has_come(self._save)
        if has_come:
            with self._lock:
                self._saves += 1
                self._save = _Agreed(f"save-{self._saves}")
            if self._process == 0 and self._saves > 1:
                _coordination.remove(f"{self._folder}/save-{self._saves - 2}")
        return has_come

    def _has_come(self, agreed: _Agreed) -> bool:
        if agreed.answer is not None and agreed.event is None:
            agreed.event = self._wait_for_answers(agreed)
        return agreed.event is not None and self._passed_events >= agreed.event

    def _wait_for_answers(self, agreed: _Agreed) -> float:
        """Returns the largest answer; infinity if a process reached the end without one."""
        while True:
            # In this order, since a process posts its answer before it leaves.
            steps_at_exit = self._read("left")
            answers = self._read(agreed.name)
            if len(answers | steps_at_exit) == jax.process_count():
                reached_end = steps_at_exit.keys() - answers.keys()
                return math.inf if reached_end else max(answers.values())
            time.sleep(_ANSWER_INTERVAL)

    def _read(self, kind: str) -> dict[int, int]:
        """Returns the numbers that processes have posted, by process."""
        texts = _coordination.read(f"{self._folder}/{kind}")
        return {int(process): int(text) for process, text in sorted(texts.items())}

    def _post(self, kind: str, number: int) -> None:
        _coordination.put(f"{self._folder}/{kind}/{self._process}", number)

    def _give_answer(self, agreed: _Agreed, event: int) -> None:
        if agreed.answer is None:
            self._post(agreed.name, event)
            agreed.answer = event

    def _answer_others(self) -> None:
        """Answers processes that ask, and ends this one if it waits for one that left."""
        # In a thread, because the thread that trains may be waiting for a program that the stopping
        # process has not started. So training itself costs nothing: no program, no message.
        while not self._is_closed.wait(_POLL_INTERVAL):
            # The service may fail to answer once. If it has ended, JAX ends the process.
            with contextlib.suppress(RuntimeError):
                for agreed in (self._stop, self._save):
                    is_asked = bool(self._read(agreed.name))
                    with self._lock:
                        if is_asked and not self._is_closed.is_set():
                            self._give_answer(agreed, self._passed_events + 1)
                steps_at_exit = self._read("left")
                is_behind = min(steps_at_exit.values(), default=math.inf) < self.started
                if is_behind and not self._is_closed.wait(LEAVE_TIMEOUT):
                    print(
                        f"functrain: process {self._process} ends: it waits for a program in "
                        f"which not all take part. {self.started} steps were started here, and "
                        f"the run was left by {_describe_exits(steps_at_exit)}",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)


def _describe_exits(steps_at_exit: dict[int, int]) -> str:
    exits = [f"process {process} after {steps} steps" for process, steps in steps_at_exit.items()]
    advice = "Stop a run with event.stop(), and give each process the same number of batches."
    return f"{', '.join(exits)}. {advice}"


def new_stop_agreement() -> StopAgreement | None:
    """Returns an agreement for a run that processes share; None if they cannot reach each other."""
    return StopAgreement() if _coordination.is_available() else None


def why_missing(process: int) -> str:
    """Returns why another process will do no more in the runs of this one; "" if it may."""
    for run in list(_open_runs):
        steps_at_exit = run._read("left")
        if process in steps_at_exit:
            return f"a run was left by {_describe_exits(steps_at_exit)}"
    return ""


def leave_all_runs() -> None:
    """Leaves all runs that are still open when the process exits."""
    for run in list(_open_runs):
        run.__exit__()
