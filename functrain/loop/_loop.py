"""The training loop: runs chunks, yields events, and saves checkpoints after them."""

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterator
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._checks import require_no_problems
from functrain.common._log_values import SumOfWeights
from functrain.common._types import PyTree, traits_of
from functrain.common._warnings import warn
from functrain.data._batch import example_count
from functrain.data._batches import Chunk
from functrain.distributed._stopping import StopAgreement
from functrain.engine import _placement
from functrain.engine._driver import Driver, copy_arrays
from functrain.engine._plan import Plan, chunks
from functrain.engine._position import Position
from functrain.engine._programs import compute_metrics
from functrain.engine._signals import DeferredSignals
from functrain.loop._arguments import RunArguments, require_batches
from functrain.loop._events import ChunkBegin, ChunkEnd, EpochBegin, EpochEnd, Event, RunEnd
from functrain.loop._resuming import Resumed
from functrain.loop._saving import Saving
from functrain.metrics._metric import Metered


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """Takes a state through the chunks of all epochs.

    Args:
      carry: The first state, which the loop takes over.
      step: The step, for its metrics.
      arguments: The arguments of the run; of one that resumes, with its position and epochs.
      plan: Chooses K.
      signals: The signals that are deferred while an event is handled.
      owns_signals: True if the loop begins and ends to defer them, False if its caller does.
      no_metrics: Metrics that have seen no batch; None if the step has no metrics.
      saving: Saves the run after an event has been handled, or None.
      resumed: The checkpoint that the run resumes from, or None.
      stopping: Agrees with other processes on the last event, or None.
      like_keras: True yields `EpochBegin` and `ChunkBegin` as well, and `EpochEnd` after an epoch
        in which the run was stopped.

    Attributes:
      position: The progress of the training.
      resumed: The checkpoint, without the arrays that were read.
    """

    carry: dataclasses.InitVar[PyTree]
    step: Any
    arguments: RunArguments
    plan: Plan
    signals: DeferredSignals
    owns_signals: bool
    no_metrics: PyTree = None
    saving: Saving | None = None
    resumed: Resumed | None = None
    stopping: StopAgreement | None = None
    like_keras: bool = False

    def __post_init__(self, carry: PyTree) -> None:
        resumed, arguments = self.resumed, self.arguments
        self.batches, self.epochs = arguments.batches, arguments.epochs
        self.position = arguments.position
        sharding = arguments.sharding
        put_chunk = None if sharding is None else _placement.chunk_placer(sharding)
        self.driver = Driver(
            self.step, rewrites=arguments.rewrites, jit=arguments.jit, put_chunk=put_chunk
        )
        self.driver.begin(self._with_metrics(carry, None if resumed is None else resumed.metrics))
        # The driver owns the arrays that were read: a reference would keep them in memory.
        self.resumed = resumed and dataclasses.replace(resumed, state=(), metrics=None)
        # True between the end of an epoch and the beginning of the next one.
        self._epoch_is_over = resumed is not None and resumed.nothing_left
        # The chunks of the next epoch, if its first chunk has been made in advance.
        self._prepared_chunks: Iterator[Chunk] | None = None
        # The event that is being handled. Its state may have been replaced.
        self._open_event: Event | None = None
        # The values of the last event, and the names of the logs for all events.
        self._last_values = {} if resumed is None else resumed.values
        self._log_names: dict[Any, list[tuple[int, str]]] = {}
        self._has_warned = False

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

    def events(self) -> Generator[Event, None, None]:
        """Yields the events of the run, once."""
        with contextlib.ExitStack() as stack:
            if self.owns_signals:
                stack.enter_context(self.signals)
            if self.saving is not None:
                stack.callback(self.saving.close, self.signals)
            if self.stopping is not None:
                stack.enter_context(self.stopping)
            # A hook may have stopped the run before the checkpoint that it resumes from.
            is_stopped = self.resumed is not None and self.resumed.stopped
            while not self._epoch_is_over and self.position.epoch < self.epochs:
                is_stopped = yield from self._epoch()
                if not is_stopped and self.position.epoch + 1 < self.epochs:
                    self._epoch_is_over = False
                    self.position = Position(self.position.step, self.position.epoch + 1)
                    # Metrics are those of one epoch.
                    self.driver.begin(self._with_metrics(self.state))
                else:
                    break
            yield from self._end(is_stopped)

    def _epoch(self) -> Generator[Event, None, bool]:
        """Yields the events of an epoch; returns True if the run stops in it."""
        steps_taken, is_stopped = 0, False
        if self.like_keras:
            yield from self._yield_event(EpochBegin(**self._event_fields()))
        if self._prepared_chunks is None:
            self._prepared_chunks = self._begin_epoch(self.position)
        for chunk in self._prepared_chunks:
            if self.like_keras:
                begin = ChunkBegin(**self._event_fields(), chunk=chunk._replace(batches=None))
                yield from self._yield_event(begin)
            event = self._run_chunk(chunk)
            steps_taken += chunk.steps
            yield from self._yield_event(event)
            is_stopped = self._is_last(event)
            if is_stopped:
                break
            self._save_if_due(event)
        self._prepared_chunks = None
        # An epoch without batches left has ended, although the run stops. Where the number of its
        # batches is unknown, the data are not asked for another one.
        is_complete = self.batches.steps is not None and self.position.batch >= self.batches.steps
        if is_stopped and not (is_complete or self.like_keras):
            return True
        return (yield from self._end_epoch(steps_taken, is_stopped))

    def _run_chunk(self, chunk: Chunk) -> ChunkEnd:
        """Dispatches the program of a chunk, and returns its event."""
        # Other processes read both counts to see whether this one still takes part in the run.
        if self.stopping is not None:
            self.stopping.started += chunk.steps
        rows = self.driver.run(chunk)
        if self.stopping is not None:
            self.stopping.dispatched += chunk.steps
        self.position = self.position.after(chunk.steps)
        count = example_count(chunk.batches, 1 + traits_of(self.step).example_axis())
        event = ChunkEnd(
            **self._event_fields(),
            steps=chunk.steps,
            examples=1 if count is None else count,
            rows=rows,
            batch_info=chunk.batch_info,
            _done=self.driver.done,
            _log_names=self._log_names,
        )
        # Keras weights batches by their first input.
        if count is None and self.plan.latest is not self.plan.first and not self.like_keras:
            self._warn_of_equal_weights(event)
        return event

    def _warn_of_equal_weights(self, event: ChunkEnd) -> None:
        """Warns once that batches of several shapes have equal weights, if the loss has none."""
        if self._has_warned or any(isinstance(x, SumOfWeights) for x in event.scalar_logs()):
            return
        self._has_warned = True
        warn(
            f"{self.batches.name}: expected batches whose arrays share the axis of examples, got "
            "several shapes that do not, so every batch counts once in the means of an epoch. Let "
            "the loss return the number that it was divided by, Aux(model_state, weight=number)."
        )

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
        if not is_stopped:
            self._prepare_next_epoch()
        self._epoch_is_over = True
        # With `start`, a run may begin where an epoch is over, and its event has been handled.
        if not (steps_taken or self.resumed or self.like_keras):
            return False
        event = EpochEnd(**self._event_fields(), stopped=is_stopped)
        yield from self._yield_event(event)
        is_stopped = self._is_last(event)
        # The last epoch is saved by `_end`.
        if not is_stopped and self.position.epoch + 1 < self.epochs:
            self._save_if_due(event)
        return is_stopped

    def _end(self, is_stopped: bool) -> Iterator[Event]:
        """Yields the last event; saves the last state, and the final one if a hook replaced it."""
        event = RunEnd(**self._event_fields(), was_stopped=is_stopped)
        is_saved = self.resumed is not None and self.resumed.finished
        if self.saving is None or is_saved or self.position.epoch >= self.epochs:
            yield from self._yield_event(event)
            return
        # Read before the event, whose hooks may replace the state, as `EarlyStopping` does. A run
        # that resumes for more epochs continues from the last state, not from the best one.
        trees, values, over = self._trees_to_save(), self._last_values, self._epoch_is_over
        try:
            yield from self._yield_event(event)
        # Also GeneratorExit: an error of a hook ends the loop that reads these events.
        except BaseException:
            # A resumed run repeats the end. It must not continue a run that was stopped, and no
            # process saves alone.
            if not is_stopped and jax.process_count() == 1:
                event = dataclasses.replace(event, values=values)
                # A second error would hide this one.
                with contextlib.suppress(Exception):
                    self.saving.save(event, trees, self.signals, epoch_is_over=over)
            raise
        if self.state is not trees["state"]:
            trees["state"], trees["final"] = event.original_state(), self.state
        event = dataclasses.replace(event, values={**values, **event.values})
        done = {"epochs": self.epochs, "stopped": is_stopped}
        self.saving.save(event, trees, self.signals, epoch_is_over=over, done=done)

    def _yield_event(self, event: Event) -> Iterator[Event]:
        """Yields an event, and continues with the state that its hooks left in it."""
        self._open_event = event
        yield event
        self._open_event, self._last_values = None, event.values
        self._continue_from(event)

    def _is_last(self, event: Event) -> bool:
        """Returns True if the run stops after this event, in all processes."""
        return event.stopped if self.stopping is None else self.stopping.is_last(event.stopped)

    def _save_if_due(self, event: Event) -> None:
        """Saves the run if that is due or a signal asks it to end; then handles the signal.

        A signal that comes while an event is handled waits until here, so that what is saved is
        always the run after an event. One that comes at the end of the run waits for that.
        """
        saving = self.saving
        if saving is not None:
            is_asked_to_end = saving.is_asked_to_end(self.signals)
            if is_asked_to_end or saving.is_due(event):
                saving.save(
                    event, self._trees_to_save(), self.signals, epoch_is_over=self._epoch_is_over
                )
            if is_asked_to_end:
                saving.end(self.signals)
        self.signals.handle_pending()

    def _trees_to_save(self) -> dict[str, PyTree]:
        """Returns the trees of a checkpoint: the state, and within an epoch its metrics so far."""
        trees = {"state": self.state}
        if self.no_metrics is not None and not self._epoch_is_over:
            trees["metrics"] = self.driver.carry.metrics
        return trees

    def _begin_epoch(self, position: Position) -> Iterator[Chunk]:
        """Yields the chunks of an epoch, beginning at the batch of the position."""
        self.batches.begin(position.epoch, position.batch)
        yield from chunks(self.batches, self.plan, self.arguments.boundaries, position)

    def _prepare_next_epoch(self) -> None:
        """Makes the next epoch's first chunk while the device computes the last one of this epoch.

        Only for data that can seek: other data must not be read before the epoch begins.
        """
        next_epoch = Position(self.position.step, self.position.epoch + 1)
        if self.batches.can_seek and next_epoch.epoch < self.epochs:
            chunks_of_epoch = self._begin_epoch(next_epoch)
            first = list(itertools.islice(chunks_of_epoch, 1))
            self._prepared_chunks = itertools.chain(first, chunks_of_epoch)

    def _with_metrics(self, state: PyTree, metrics: PyTree = None) -> PyTree:
        """Returns the state with metrics if the step has some; by default with empty ones."""
        if self.no_metrics is None:
            return state
        metrics = self.no_metrics if metrics is None else metrics
        # A copy: the next program consumes the metrics, and the empty ones are used again.
        return Metered(state, _placement.replicate_beside(copy_arrays(metrics), state))

    def _event_fields(self) -> dict[str, Any]:
        """Returns the fields that all events have."""
        of_members = traits_of(self.step).is_population
        fields = {"position": self.position, "state": self.state, "_of_members": of_members}
        if self.no_metrics is not None:
            # Bound now: after the next program, the driver has another carry.
            step, metrics = self.step, self.driver.carry.metrics
            fields["_metrics"] = lambda: compute_metrics(step, metrics)
        return fields

    def _continue_from(self, event: Event) -> None:
        """Continues with the state of an event; copies it if a hook has changed it."""
        if not event.is_state_changed():
            return
        state = event.state
        # The next program consumes the state, and only `hand_over` promises that nothing else uses
        # its arrays.
        if not event._is_handed_over:
            # Before the comparison: copies of NumPy arrays and Python numbers are jax arrays.
            if _tree.structure(state) == _tree.structure(self.state):
                state = _tree.copy(state)
            changes = _tree.differences(self.state, state)
            expected = "a state with the structure, shapes and dtypes it had"
            advice = "Assign a state with all of its leaves: event.state = new_state."
            require_no_problems("event.state", changes, expected, advice)
            state = _placement.place_on_mesh(state, self.arguments.sharding)
        carry = self.driver.carry
        self.driver.begin(carry.replace(state=state) if isinstance(carry, Metered) else state)
