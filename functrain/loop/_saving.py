"""Saves a run in checkpoints."""

import functools
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from functrain.checkpoint._checkpointer import Checkpointer
from functrain.checkpoint._processes import is_multiprocess
from functrain.checkpoint._processes import main_group as processes
from functrain.common import _tree
from functrain.common._checks import require, require_instance
from functrain.common._log_values import split_members
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.data._batches import Batches
from functrain.distributed import _coordination
from functrain.distributed._stopping import StopAgreement
from functrain.engine import _times
from functrain.engine._placement import abstract_on_mesh
from functrain.engine._position import Position
from functrain.engine._signals import DeferredSignals, has_preemption_service, is_time_to_end
from functrain.loop._arguments import RunArguments
from functrain.loop._events import EpochEnd, Event
from functrain.loop._finite import LossWatch
from functrain.loop._resuming import Part, Resumed, resume


class Saving:
    """Saves a run when its checkpointer is due, at its end, and after SIGTERM.

    Args:
      checkpointer: Writes the checkpoints, and knows when one is due.
      batches: The data.
      parts: Further parts of the run that are saved and resumed, by name.
      losses: The losses of the run. The last checkpoint before they became NaN is kept.

    Attributes:
      trigger: The trigger at whose steps chunks must end.

    Raises:
      TypeError: `checkpointer` is not a Checkpointer.
      ValueError: It depends on the time, and there are several processes that cannot agree.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        batches: Batches,
        parts: Mapping[str, Part],
        losses: LossWatch | None = None,
    ) -> None:
        advice = "Make one with functrain.Checkpointer('run')."
        expected = "a functrain.Checkpointer"
        require_instance("checkpointer", checkpointer, Checkpointer, expected, advice)
        self.trigger = checkpointer.every
        # All processes must save at the same step. Their clocks differ: that of the first counts.
        self._is_by_clock = getattr(self.trigger, "seconds", None) is not None
        can_agree = not is_multiprocess() or _coordination.is_available()
        expected = "every=functrain.every(steps=...) or epochs= in processes without JAX's service"
        require(can_agree or not self._is_by_clock, "checkpointer", expected, checkpointer)
        self._checkpointer, self._batches, self._parts = checkpointer, batches, parts
        self._losses = losses
        self._is_to_end = False
        # An interval in seconds begins with the run.
        self._last_save_time = time.perf_counter()
        self._has_checked_monitor = checkpointer.monitor is None
        self._resumed: Resumed | None = None

    def resume(
        self, state: PyTree, metrics: PyTree, arguments: RunArguments, *, releases: bool
    ) -> Resumed | None:
        """Reads the last checkpoint, and restores the data and the parts; None if there is none.

        Args:
          state: The caller's state, which shows where to put the arrays of the checkpoint.
          metrics: A tree like the run's metrics, or None.
          arguments: The arguments of the run.
          releases: True to free the caller's state before the arrays are read.
        """
        # Some data cannot seek, and must note their position from the first batch on.
        self._batches.track()
        # A copy would be a second state in memory during the read, and so would a state that the
        # run takes over.
        like = abstract_on_mesh(state, arguments.sharding)
        release = functools.partial(_tree.delete, state) if releases else None
        self._resumed = resume(
            self._checkpointer, self._batches, self._parts, like, metrics, arguments.epochs, release
        )
        return self._resumed

    def is_due(
        self, event: Event, signals: DeferredSignals, stopping: StopAgreement | None
    ) -> bool:
        """Returns True if the run should be saved after an event; call it once after each event."""
        step, epoch, _ = event.position
        epochs = epoch + 1 if isinstance(event, EpochEnd) else None
        is_due = self.trigger.due(step, epochs, time.perf_counter() - self._last_save_time)
        is_asked, signals.asks_for_save = signals.asks_for_save, False
        if stopping is not None:
            wants_to_save = is_asked or (self._is_by_clock and is_due and jax.process_index() == 0)
            is_asked = stopping.is_save(wants_to_save)
            is_due = is_due and not self._is_by_clock
        is_improved = epochs is not None and self._checkpointer._is_improved(event.values)
        return is_due or is_asked or is_improved

    def save(
        self,
        position: Position,
        values: Mapping[str, Any],
        trees: dict[str, PyTree],
        signals: DeferredSignals,
        *,
        epoch_is_over: bool,
        done: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves the run as it is after an event.

        Args:
          position: The position of the run.
          values: The values of the event.
          trees: The state, and in mid-epoch the metrics.
          signals: The deferred signals, which are discarded if the save fails.
          epoch_is_over: True if the event at the end of the epoch has been yielded.
          done: For a run that is over, its number of epochs, and whether it was stopped.
        """
        self._last_save_time = time.perf_counter()
        self._check_monitor(values, epoch_is_over)
        documents = {name: part.state() for name, part in self._parts.items()}
        if self._resumed is not None and self._resumed.nothing_left:
            documents["data"] = self._resumed.data
        else:
            documents["data"] = self._batches.state(epoch_is_over=epoch_is_over)
        last = None if self._losses is None else self._losses.last_finite
        # If the save fails, the error should be seen, and not a signal that would end the process.
        with _times.spent("saving"), signals.discard_on_error(), self._checkpointer._save_lock:
            self._checkpointer._write(
                trees,
                position,
                values,
                documents,
                # After the end, no program consumes the state while it is written.
                copy=done is None,
                kept_before=None if last is None or last >= position.step else last,
                epoch_over=epoch_is_over,
                done=done,
                data=self._batches.fingerprint(),
            )

    def is_asked_to_end(self, signals: DeferredSignals) -> bool:
        """Returns True if the run must end now after a signal; call it once after each event."""
        if not is_multiprocess():
            return signals.is_pending
        # JAX's preemption service has its own handler of SIGTERM.
        if not self._is_to_end and has_preemption_service():
            self._is_to_end = is_time_to_end()
        elif not self._is_to_end:
            # SIGTERM may reach only some of the processes, so they ask each other. Ctrl-C ends each
            # on its own, without a save.
            has_sigterm = signals.pending == signal.SIGTERM
            self._is_to_end = any(processes.gather(lambda: has_sigterm))
        return self._is_to_end

    def end(self, signals: DeferredSignals, step: int) -> None:
        """Says what is saved, and passes the signal on, which usually ends the run."""
        # That handler may let the run continue.
        self._is_to_end = False
        with signals.discard_on_error():
            self._checkpointer.wait()
        if jax.process_index() == 0:
            directory = self._checkpointer.directory
            line = f"Saved after {step:,} steps: {directory}. The same call resumes."
            print(line, file=sys.stderr)
        # The signal may have reached another process only, so there may be no handler to call.
        if is_multiprocess():
            raise SystemExit(128 + signal.SIGTERM)
        signals.handle_pending()

    def close(self, signals: DeferredSignals) -> None:
        """Waits until checkpoints are written, and releases the directory."""
        with signals.discard_on_error(), _times.spent("saving"):
            self._checkpointer.close()

    def _check_monitor(self, values: Mapping[str, Any], epoch_is_over: bool) -> None:
        """Warns at the first save after an epoch if the monitored value is missing."""
        name = self._checkpointer.monitor
        is_missing = name not in split_members(values)
        if is_missing and epoch_is_over and not self._has_checked_monitor:
            warn(
                f"monitor: expected one of {sorted(values)}, got {name!r}. Values of an evaluation "
                "need eval_data and eval_step; validation_data in bridge.fit."
            )
        self._has_checked_monitor |= epoch_is_over or not is_missing
