"""Defers Ctrl-C and SIGTERM until the state is complete."""

import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal, Self

import jax

# JAX identifies a call of its preemption service by its number, which must be the same in all
# processes, and one higher at each call, across all runs of a process.
_call_numbers = itertools.count(1)

_SIGUSR1: int | None = getattr(signal, "SIGUSR1", None)  # not on Windows


class DeferredSignals:
    """Context manager: defers the first Ctrl-C or SIGTERM; a second one is handled at once.

    A signal may arrive after a program has taken over the state's buffers and before the new state
    is assigned, and then both would be lost. Outside the main thread nothing is deferred. Neither
    is Ctrl-C if it has a handler other than Python's.

    If an `Exception` is raised while a signal is pending, the signal is handled instead of it: the
    error may be its consequence, since Ctrl-C also ends the workers of a data loader.

    SIGUSR1, which would end the process, asks for a save if there is a checkpointer.

    A block within a hook of a run handles the Ctrl-C that the run has deferred. Only a fit does so
    if the run has a checkpointer: the run waits for a pass, and saves itself then.

    Args:
      kind: A "pass" is an evaluation or a prediction. A "run" does not defer Ctrl-C, since its loop
        is the user's.
      saves: True if there is a checkpointer. A SIGTERM that would end the process then raises
        SystemExit(143) when it is handled. Otherwise only one that Python code handles is deferred.
    """

    def __init__(
        self, kind: Literal["fit", "run", "pass"] = "pass", *, saves: bool = False
    ) -> None:
        self._kind, self._saves = kind, saves
        self._handlers: dict[int, Any] = {}
        # The number of the signal that waits to be handled.
        self.pending: int | None = None
        self.asks_for_save = False
        self._is_over = False
        # Only a handler of Python's is replaced by a block, so that of the outermost is in place.
        owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
        is_main = threading.current_thread() is threading.main_thread()
        is_enclosed = isinstance(owner, DeferredSignals) and is_main
        self._enclosing: DeferredSignals | None = owner if is_enclosed else None

    @property
    def is_pending(self) -> bool:
        """True if a signal is waiting to be handled."""
        return self.pending is not None or self._enclosing_pending() is not None

    def __enter__(self) -> Self:
        """Begins to defer the signals."""
        # Python sets handlers in the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return self
        # Another handler of Ctrl-C, such as a notebook's or a framework's, is left in place.
        has_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._kind != "run" and has_default:
            self._handlers[signal.SIGINT] = signal.default_int_handler
        handler = signal.getsignal(signal.SIGTERM)
        # SIGTERM is left alone if it is ignored, or handled by code other than Python's.
        if self._saves:
            ends_process = callable(handler) or handler is signal.SIG_DFL
            # JAX's preemption service has its own handler of SIGTERM.
            is_deferred = ends_process and not has_preemption_service()
        else:
            is_deferred = callable(handler) and self._kind != "run"
        if is_deferred:
            self._handlers[signal.SIGTERM] = handler
        if self._saves and _SIGUSR1 and signal.getsignal(_SIGUSR1) is signal.SIG_DFL:
            self._handlers[_SIGUSR1] = signal.SIG_DFL
        for number in self._handlers:
            signal.signal(number, self._defer)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Restores the previous handlers, and handles a pending signal."""
        try:
            # There are none outside of the main thread.
            for number in self._handlers:
                # Of two blocks that overlap, the second one stays in place when the first one ends.
                if signal.getsignal(number) == self._defer:
                    signal.signal(number, self._previous_handler(number))
        finally:
            # Not before: Ctrl-C would raise at once, and leave this handler in place. If it comes
            # when its own handler is back, this one may stay in place for SIGTERM and passes it on.
            self._is_over = True
        if error is None or isinstance(error, Exception):
            self.handle_pending()
            return
        # An exception is on its way that must not be replaced, so a pending signal is sent again
        # and handled afterwards. Python discards what is raised while a generator is closed.
        # KeyboardInterrupt is Ctrl-C itself, but may hide a pending SIGTERM.
        hides_sigterm = isinstance(error, KeyboardInterrupt) and self.pending == signal.SIGTERM
        if self.pending is not None and (isinstance(error, GeneratorExit) or hides_sigterm):
            signal.raise_signal(self.pending)

    def handle_pending(self) -> None:
        """Handles a pending signal now, which usually raises."""
        number, self.pending = self.pending, None
        if number is not None:
            self._handle(number, None)
        if (enclosing := self._enclosing_pending()) is not None:
            enclosing.handle_pending()

    def _enclosing_pending(self) -> "DeferredSignals | None":
        """Returns the block that this one is within, if it has a signal to handle here."""
        enclosing = self._enclosing
        # At its end, a block leaves it to the enclosing one, whose run may save itself first.
        if enclosing is None or enclosing.pending is None or self._kind == "run" or self._is_over:
            return None
        waits = self._kind == "pass" and enclosing._saves
        return None if waits else enclosing

    @contextlib.contextmanager
    def discard_on_error(self) -> Iterator[None]:
        """Context manager: discards a pending signal if the save fails that has to come first.

        The error is raised instead, because exit status 143 promises that the run was saved.
        """
        try:
            yield
        except Exception:
            self.pending = None
            raise

    def _previous_handler(self, number: int) -> Any:
        """Returns the handler before this block, or before a block that is over by now."""
        handler = self._handlers[number]
        owner = getattr(handler, "__self__", None)
        if isinstance(owner, DeferredSignals) and owner._is_over:
            return owner._previous_handler(number)
        return handler

    def _handle(self, number: int, frame: FrameType | None) -> None:
        handler = self._previous_handler(number)
        # 128 + number is the status that shells report for a process that a signal ended.
        if not callable(handler):
            raise SystemExit(128 + number)
        handler(number, frame)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if number == _SIGUSR1:
            self.asks_for_save = True
            return
        if self.pending is not None or self._is_over:
            self._handle(number, frame)
            return
        self.pending = number
        if number == signal.SIGINT:
            # Python raises RuntimeError for a print that interrupts another one to the same stream.
            with contextlib.suppress(RuntimeError):
                print(
                    "\nStopping after the current program. Press Ctrl-C again to stop at once.",
                    file=sys.stderr,
                )


def has_preemption_service() -> bool:
    """Returns True if JAX's preemption service is active: it then handles SIGTERM itself."""
    is_configured = getattr(jax.config, "jax_enable_preemption_service", True)
    return bool(jax.process_count() > 1 and is_configured)


def is_time_to_end() -> bool:
    """Returns True if a process got SIGTERM, and all processes have reached the step to end at.

    All processes must call this after the same events. It does not wait: a few events pass until
    the processes have agreed on one that none of them has passed. If a process is killed meanwhile,
    JAX notices that it is gone and ends the others.
    """
    # Only runs with several processes need this module.
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(next(_call_numbers)))
