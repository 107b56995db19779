"""Ctrl-C and SIGTERM that lose nothing."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal, Self


class DeferredSignals:
    """Holds back the first signal, of some kinds, within its context.

    A signal may come between a program taking over the state's buffers and the new state having a
    name, and then both are lost. A second one acts at once. Does nothing outside the main thread,
    where Ctrl-C is handled by somebody else, or where SIGTERM ends the process by itself.

    An error while one waits is taken for its consequence: Ctrl-C ends the workers of a loader too.

    Args:
      interrupt: Whether to hold back Ctrl-C.
      terminate: Which SIGTERM to hold back: none, one that Python code handles, or any. One that
        would end the process ends it with SystemExit(143) when it is acted on.
    """

    def __init__(
        self, *, interrupt: bool = True, terminate: Literal["none", "handled", "any"] = "handled"
    ) -> None:
        self._interrupt, self._terminate = interrupt, terminate
        self._handlers: dict[int, Any] = {}
        self._pending: list[tuple[int, FrameType | None]] = []

    @property
    def is_pending(self) -> bool:
        """Whether a signal waits."""
        return bool(self._pending)

    def __enter__(self) -> Self:
        """Begins to hold them back."""
        if threading.current_thread() is not threading.main_thread():
            return self
        if self._interrupt and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handlers[signal.SIGINT] = signal.default_int_handler
        found = signal.getsignal(signal.SIGTERM)
        held = {"handled": callable(found), "any": callable(found) or found is signal.SIG_DFL}
        if held.get(self._terminate, False):
            self._handlers[signal.SIGTERM] = found
        for number in self._handlers:
            signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Gives the signals back to those who handled them; one that waits is handled now."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is None or isinstance(error, Exception):
            self.handle_pending()
            return
        # What is raised in a loop left early is lost, and of two signals the one of another kind.
        raised = {GeneratorExit: (), KeyboardInterrupt: (signal.SIGINT,)}.get(type(error))
        for number, _ in self._pending:
            if raised is not None and number not in raised:
                signal.raise_signal(number)

    def handle_pending(self) -> None:
        """Lets a signal that came be handled now: it mostly raises."""
        if self._pending:
            self._handle(*self._pending.pop(0))

    @contextlib.contextmanager
    def discard_on_error(self) -> Iterator[None]:
        """Forgets a signal where work fails that it promises: 143 says that all is saved."""
        try:
            yield
        except Exception:
            self._pending.clear()
            raise

    def _handle(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        if not callable(handler):
            raise SystemExit(128 + number)
        handler(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self._handle(number, frame)
            return
        self._pending.append((number, frame))
        if number == signal.SIGINT:
            with contextlib.suppress(RuntimeError):  # it came in the midst of another write
                print(
                    "\nStopping when this program is over; Ctrl-C once more stops at once.",
                    file=sys.stderr,
                )
