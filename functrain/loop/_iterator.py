"""Runs as iterators over events: the caller decides what happens between programs."""

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterator

import jax

from functrain.common._types import PyTree
from functrain.engine._position import Position
from functrain.engine._signals import DeferredSignals
from functrain.loop._events import ChunkEnd, EpochEnd, Event, LogsReady
from functrain.loop._loop import Loop
from functrain.loop._saving import Resumed


class Run(Iterator[Event]):
    """An iterator over the events of a run, with the last complete state after an error; see `run`.

    When the last reference to it is gone, for example after a `break`, the run is closed: it waits
    until checkpoints are written, and restores the signal handlers.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain import run
      >>> events = run(jnp.zeros(()), lambda total, x: (total + x, {}), [jnp.ones(())] * 3)
      >>> [type(event).__name__ for event in events]
      ['ChunkEnd', 'EpochEnd', 'RunEnd']
      >>> events.position
      Position(step=3, epoch=0, batch=3)
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        # Nothing refers back to this object: it is closed when its last reference is gone. In a
        # cycle, it would wait for the garbage collector, which runs late and in any thread.
        self._events = loop.events()
        # Also runs at the exit of the interpreter, before modules are cleared. `__del__` would run
        # afterwards, and fail.
        weakref.finalize(self, _close, self._events, loop)

    def __repr__(self) -> str:
        return f"Run({self.position})"

    def __next__(self) -> Event:
        """Runs the next chunk, if one is due, and returns the next event."""
        event: Event = next(self._events)
        return event

    @property
    def position(self) -> Position:
        """The progress of the training."""
        return self._loop.position

    @property
    def epochs(self) -> int:
        """The number of epochs of the training."""
        return self._loop.epochs

    @property
    def resumed(self) -> Resumed | None:
        """The checkpoint that the run resumed from, with its `position` and `finished`; or None."""
        return self._loop.resumed

    @property
    def state(self) -> PyTree:
        """The current state; the next program consumes it."""
        return self._loop.state

    def last_complete_state(self) -> tuple[PyTree, Position] | None:
        """Returns the last complete state and its position, after an error during a run.

        Returns None if a program has failed: it has consumed its state. A state that was assigned
        to the last event is returned if it fits.
        """
        return self._loop.last_complete_state()

    def take_unread_logs(self) -> LogsReady | None:
        """Takes the logs of the last chunk if their event has not been yielded yet, else None.

        The run does not yield them any more. For use after an error.
        """
        return self._loop.take_unread_logs()

    def save(self, *, epoch_is_over: bool | None = None) -> None:
        """Saves the run with the state of the last event, even if no save is due.

        If the checkpoint depends on logs, call `take_unread_logs` first.

        Args:
          epoch_is_over: None saves the position of the last event. False, at the end of an epoch,
            saves a position before the end of the epoch, so that the resumed run yields the
            `EpochEnd` again.

        Raises:
          ValueError: The run has no checkpointer, or there has been no event yet.
        """
        self._loop.save(epoch_is_over=epoch_is_over)

    def handle_events(
        self,
        handle: Callable[[Event], None],
        handle_logs: Callable[[LogsReady], None] = lambda event: None,
        *,
        signals: DeferredSignals | None = None,
    ) -> Iterator[Event]:
        """Yields each event after it, and the deferred signals, have been handled.

        A run with a checkpointer saves itself before a signal is handled, and after an error at its
        end.

        Args:
          handle: Called with each event except `LogsReady`.
          handle_logs: Called with each `LogsReady`, which is not yielded; after an error, called
            with the logs of the last steps before it.
          signals: The deferred signals.
        """
        try:
            for event in self:
                if isinstance(event, LogsReady):
                    handle_logs(event)
                    continue
                handle(event)
                saving = self._loop.saving
                can_save = isinstance(event, ChunkEnd | EpochEnd)
                # A run that has been stopped ends by itself, and then saves that it was stopped.
                will_save = saving is not None and event.stopped
                if signals is not None and signals.is_pending and can_save and not will_save:
                    # Several processes get the signal at different steps, so none saves here: they
                    # could not save together.
                    if saving is not None and jax.process_count() == 1:
                        self._handle_unread(handle_logs)
                        self.save()
                    signals.handle_pending()
                yield event
        except BaseException:
            # If the last program failed, it has no logs.
            with contextlib.suppress(Exception):
                self._handle_unread(handle_logs)
            # Now, while the hooks are open: the run itself is closed after them.
            self._loop.save_failed_end()
            raise

    def _handle_unread(self, handle_logs: Callable[[LogsReady], None]) -> None:
        logs = self.take_unread_logs()
        if logs is not None:
            handle_logs(logs)

    def handle_signal_in_epoch_end(self, signals: DeferredSignals) -> None:
        """Handles a signal that arrives while the end of an epoch is handled.

        A run with a checkpointer saves itself as it was before the end of the epoch first. If it
        has been stopped, or a hook has donated the state of the event, the signal is handled after
        the event.
        """
        self._loop.handle_signal_in_epoch_end(signals)

    def close(self) -> None:
        """Ends the run here, and waits until checkpoints are written."""
        _close(self._events, self._loop)


def _close(events: Generator[Event, None, None], loop: Loop) -> None:
    events.close()
    # A generator that was never started does not run its `finally` clauses.
    if loop.saving is not None:
        loop.saving.close()
