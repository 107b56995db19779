"""The training loop: runs chunks, yields events, and saves checkpoints after them."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._types import PyTree, traits_of
from functrain.data._batches import Chunk, example_count
from functrain.distributed._stopping import new_stop_agreement
from functrain.engine import _placement, _times
from functrain.engine._driver import Driver
from functrain.engine._plan import Plan, chunks, nbytes
from functrain.engine._position import Position
from functrain.engine._programs import compute_metrics, initial_metrics
from functrain.engine._signals import DeferredSignals
from functrain.loop._arguments import RunArguments, own_state, require_batches
from functrain.loop._events import (
    ChunkBegin,
    ChunkEnd,
    EpochBegin,
    EpochEnd,
    Event,
    EventT,
    LateLogs,
    RunEnd,
)
from functrain.loop._resuming import Resumed
from functrain.loop._saving import Saving
from functrain.metrics._metric import Metered
from functrain.step._metered import MeteredStep


class Loop:
    """Takes a state through the chunks of all epochs, and yields events between them.

    Args:
      state: The first state, or its shapes if there is a checkpoint to resume from.
      step: The step.
      arguments: The other arguments of the run.
      receivers: Functions that get the `ChunkEnd` of each chunk with the next event, when its logs
        have arrived, so that nobody waits for them.
      saving: Saves the run after an event has been handled, and resumes it; or None.
      signals: The signals that the caller defers. By default the loop defers SIGTERM if it saves.
      plan: Chooses K; by default it is made from the arguments.
      like_keras: True yields `EpochBegin` and `ChunkBegin` as well, and `EpochEnd` after an epoch
        in which the run was stopped. The state is not copied: the hook of bridge hands over its own
        one before the first step.

    Attributes:
      events: The events of the run, once. Call `close` in the end, unless all were taken.
      arguments: The arguments; of a run that resumes, with its position and number of epochs.
      position: The progress of the training.
      resumed: The checkpoint that the run resumes from, without its arrays; or None.
    """

    def __init__(
        self,
        state: PyTree,
        step: Any,
        arguments: RunArguments,
        *,
        receivers: Sequence[Callable[[ChunkEnd], None]] = (),
        saving: Saving | None = None,
        signals: DeferredSignals | None = None,
        plan: Plan | None = None,
        like_keras: bool = False,
    ) -> None:
        self.step, self.arguments, self.batches = step, arguments, arguments.batches
        self.saving, self.like_keras, self._pass_logs = saving, like_keras, LateLogs(receivers)
        self._owns_signals = signals is None
        self.signals = signals or DeferredSignals("run", saves=saving is not None)
        self.resumed: Resumed | None = None
        # Makes metrics that have seen no batch; None if the step has no metrics.
        has_metrics = isinstance(step, MeteredStep)
        self._new_metrics = initial_metrics(step, state) if has_metrics else None
        # True between the end of an epoch and the beginning of the next one.
        self._epoch_is_over = False
        # The chunks of the next epoch, if its first chunk has been made in advance.
        self._prepared_chunks: Iterator[Chunk] | None = None
        # The event that is being handled.
        self._open_event: Event | None = None
        # The values of the last event, and the names of the logs for all events.
        self._last_values: dict[str, Any] = {}
        self._log_names: dict[Any, list[tuple[int, str]]] = {}
        self.events = self._run()
        try:
            self._begin(state, plan)
        except BaseException:
            self.close()
            raise

    def _begin(self, state: PyTree, plan: Plan | None) -> None:
        """Makes the plan and the driver, which gets the state."""
        state, metrics = self._take_over(state)
        arguments = self.arguments
        self.epochs, self.position = arguments.epochs, arguments.position
        self.batches.require_epochs(self.epochs - self.position.epoch)
        # A prediction has a plan of its own.
        self.plan = plan or arguments.new_plan(state, nbytes(state))
        self._chunks = functools.partial(chunks, self.batches, self.plan, arguments.boundaries)
        sharding = arguments.sharding
        put_chunk = None if sharding is None else _placement.chunk_placer(sharding)
        self.driver = Driver(
            self.step, rewrites=arguments.rewrites, jit=arguments.jit, put_chunk=put_chunk
        )
        self.driver.begin(self._with_metrics(state, metrics))
        # Processes that share arrays or checkpoints must stop at the same step.
        is_shared = self.saving is not None or _placement.spans_processes(state, sharding)
        needs_agreement = jax.process_count() > 1 and is_shared
        self.stopping = new_stop_agreement() if needs_agreement else None

    def _take_over(self, state: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the state and metrics of the checkpoint, or a state that the run owns, and None.

        The arguments become those of the checkpoint.
        """
        if (saving := self.saving) is not None:
            self._change_arguments(boundaries=(*self.arguments.boundaries, saving.trigger))
            releases = self.arguments.donate and not self.like_keras
            like = self._new_metrics and self._new_metrics()
            self.resumed = saving.resume(state, like, self.arguments, releases=releases)
        if (resumed := self.resumed) is None:
            return state if self.like_keras else own_state(state, self.arguments), None
        self._change_arguments(epochs=resumed.epochs, position=resumed.position)
        self._epoch_is_over, self._last_values = resumed.nothing_left, resumed.values
        # The driver owns the arrays that were read: a reference would keep them in memory.
        self.resumed = dataclasses.replace(resumed, state=(), metrics=None)
        state, metrics = _tree.copy_if_needed((resumed.state, resumed.metrics))
        return state, metrics

    def _change_arguments(self, **changes: Any) -> None:
        self.arguments = dataclasses.replace(self.arguments, **changes)

    @property
    def state(self) -> PyTree:
        """The current state; the next program consumes it."""
        carry = self.driver.carry
        return carry.state if isinstance(carry, Metered) else carry

    def last_complete_state(self) -> tuple[PyTree, Position] | None:
        """Returns the last complete state and its position; see `Run`."""
        if self._open_event is not None:
            # The caller is handling an error already, and a second one would hide it.
            with contextlib.suppress(Exception):
                self._continue_from(self._open_event)
        return (self.state, self.position) if self.driver.is_complete() else None

    def close(self) -> None:
        """Ends the run here, and waits until checkpoints are written."""
        self.events.close()
        # A generator that was never started does not run its `finally` clauses.
        if self.saving is not None:
            self.saving.close(self.signals)

    def _run(self) -> Generator[Event, None, None]:
        """Yields the events of the run."""
        with contextlib.ExitStack() as stack:
            if self._owns_signals:
                stack.enter_context(self.signals)
            if self.saving is not None:
                stack.callback(self.saving.close, self.signals)
            if self.stopping is not None:
                stack.enter_context(self.stopping)
            # A hook may have stopped the run before the checkpoint that it resumes from.
            is_stopped = self.resumed is not None and self.resumed.stopped
            try:
                while not self._epoch_is_over and self.position.epoch < self.epochs:
                    is_stopped = yield from self._epoch()
                    if is_stopped or self.position.epoch + 1 >= self.epochs:
                        break
                    self._epoch_is_over = False
                    self.position = Position(self.position.step, self.position.epoch + 1)
                    # Metrics are those of one epoch.
                    self.driver.begin(self._with_metrics(self.state))
                yield from self._end(is_stopped)
            except BaseException:
                # If the last program failed, it has no logs.
                with contextlib.suppress(Exception):
                    self._pass_logs()
                raise

    def _epoch(self) -> Generator[Event, None, bool]:
        """Yields the events of an epoch; returns True if the run stops in it."""
        if self.like_keras:
            yield from self._yield_event(EpochBegin)
        new_chunks = self._prepared_chunks or self._chunks(self.position)
        self._prepared_chunks, steps_taken, is_stopped = None, 0, False
        for chunk in _times.timed("data", new_chunks, unless=self.driver.is_running):
            steps_taken += chunk.steps
            is_stopped = yield from self._take_chunk(chunk)
            if is_stopped:
                break
        # An epoch without batches left has ended, although the run stops. Where the number of its
        # batches is unknown, the data are not asked for another one.
        is_complete = self.batches.steps is not None and self.position.batch >= self.batches.steps
        if is_stopped and not (is_complete or self.like_keras):
            return True
        return (yield from self._end_epoch(steps_taken, is_stopped))

    def _take_chunk(self, chunk: Chunk) -> Generator[Event, None, bool]:
        """Dispatches a chunk's program, and yields its event; returns True if the run stops."""
        if self.like_keras:
            yield from self._yield_event(ChunkBegin, chunk=chunk._replace(batches=None))
        # Other processes read both counts to see whether this one still takes part in the run.
        if self.stopping is not None:
            self.stopping.started += chunk.steps
        rows = self.driver.run(chunk)
        if self.stopping is not None:
            self.stopping.dispatched += chunk.steps
        self.position = self.position.after(chunk.steps)
        count = example_count(chunk.batches, 1 + traits_of(self.step).example_axis)
        event = yield from self._yield_event(
            ChunkEnd,
            steps=chunk.steps,
            examples=1 if count is None else count,
            rows=rows,
            batch_info=chunk.batch_info,
            _has_equal_weight=count is None and self.plan.latest is not self.plan.first,
            _done=self.driver.done,
            _log_names=self._log_names,
        )
        return not self._continues_after(event)

    def _end_epoch(self, steps_taken: int, is_stopped: bool) -> Generator[Event, None, bool]:
        """Yields the event at the end of an epoch; returns True if the run stops there.

        Args:
          steps_taken: Steps of this epoch that this run has taken.
          is_stopped: True if the run was stopped before this event.
        """
        # Keras reports empty epochs itself, with a warning.
        if not self.like_keras:
            place = f" in epoch {self.position.epoch}"
            require_batches(steps_taken or self.position.batch, place)
        next_epoch = Position(self.position.step, self.position.epoch + 1)
        # The first chunk of the next epoch is made while the device computes the last one of this
        # epoch. Data that cannot seek must not be read before the epoch begins.
        if not is_stopped and self.batches.can_seek and next_epoch.epoch < self.epochs:
            chunks_of_epoch = self._chunks(next_epoch)
            first = list(itertools.islice(chunks_of_epoch, 1))
            self._prepared_chunks = itertools.chain(first, chunks_of_epoch)
        self._epoch_is_over = True
        # With `start`, a run may begin where an epoch is over, and its event has been handled.
        if not (steps_taken or self.resumed or self.like_keras):
            return False
        event = yield from self._yield_event(EpochEnd, stopped=is_stopped)
        return not self._continues_after(event)

    def _end(self, is_stopped: bool) -> Iterator[Event]:
        """Yields the last event; saves the last state, and the final one if a hook replaced it."""
        is_saved = self.resumed is not None and self.resumed.finished
        if self.saving is None or is_saved or self.position.epoch >= self.epochs:
            yield from self._yield_event(RunEnd, was_stopped=is_stopped)
            return
        # Read before the event, whose hooks may replace the state, as `EarlyStopping` does. A run
        # that resumes for more epochs continues from the last state, not from the best one.
        trees, values = self._trees_to_save(), self._last_values
        try:
            event = yield from self._yield_event(RunEnd, was_stopped=is_stopped)
        # Also GeneratorExit: an error of a hook ends the loop that reads these events.
        except BaseException:
            # A resumed run repeats the end. It must not continue a run that was stopped, and no
            # process saves alone.
            if not is_stopped and jax.process_count() == 1:
                # A second error would hide this one.
                with contextlib.suppress(Exception):
                    self._save(values, trees)
            raise
        if self.state is not trees["state"]:
            trees["final"] = self.state
        done = {"epochs": self.epochs, "stopped": is_stopped}
        self._save({**values, **event.values}, trees, done)

    def _yield_event(self, kind: type[EventT], **fields: Any) -> Generator[Event, None, EventT]:
        """Yields an event, continues with the state that its hooks left in it, and returns it."""
        if self._new_metrics is not None:
            # Bound now: after the next program, the driver has another carry.
            step, metrics = self.step, self.driver.carry.metrics
            fields["_metrics"] = lambda: compute_metrics(step, metrics)
        of_members = traits_of(self.step).is_population
        event = kind(position=self.position, state=self.state, _of_members=of_members, **fields)
        self._open_event = event
        # Before a program is dispatched, its predecessor still runs.
        if not isinstance(event, EpochBegin | ChunkBegin):
            self._pass_logs(event)
        yield event
        self._open_event, self._last_values = None, event.values
        self._continue_from(event)
        return event

    def _continue_from(self, event: Event) -> None:
        """Continues with the state that was assigned to an event, if there is one."""
        state, carry = event.new_state(), self.driver.carry
        if state is not None:
            state = _placement.place_on_mesh(state, self.arguments.sharding)
            self.driver.begin(carry.replace(state=state) if isinstance(carry, Metered) else state)

    def _continues_after(self, event: Event) -> bool:
        """Returns False if the run stops after an event; else saves it if that is due.

        A signal that comes while an event is handled waits until here, so that what is saved is
        always the run after an event. One that comes at the end of the run waits for that.
        """
        is_last = event.stopped if self.stopping is None else self.stopping.is_last(event.stopped)
        if is_last:
            return False
        # The last epoch is saved by `_end`.
        if self._epoch_is_over and self.position.epoch + 1 >= self.epochs:
            return True
        if (saving := self.saving) is not None:
            is_due = saving.is_due(event, self.signals, self.stopping)
            is_asked_to_end = saving.is_asked_to_end(self.signals)
            if is_asked_to_end or is_due:
                self._save(event.values, self._trees_to_save())
            if is_asked_to_end:
                saving.end(self.signals, self.position.step)
        self.signals.handle_pending()
        return True

    def _trees_to_save(self) -> dict[str, PyTree]:
        """Returns the trees of a checkpoint: the state, and within an epoch its metrics so far."""
        trees = {"state": self.state}
        if self._new_metrics is not None and not self._epoch_is_over:
            trees["metrics"] = self.driver.carry.metrics
        return trees

    def _save(self, values: dict[str, Any], trees: dict[str, PyTree], done: Any = None) -> None:
        """Saves the run as it is after an event with these values; see `Saving.save`."""
        assert self.saving is not None
        # The recorder saves the logs of the last program, too.
        self._pass_logs()
        over = self._epoch_is_over
        self.saving.save(self.position, values, trees, self.signals, epoch_is_over=over, done=done)

    def _with_metrics(self, state: PyTree, metrics: PyTree = None) -> PyTree:
        """Returns the state with metrics if the step has some; by default with empty ones."""
        if self._new_metrics is None:
            return state
        metrics = self._new_metrics() if metrics is None else metrics
        return Metered(state, _placement.replicate_beside(metrics, state))
