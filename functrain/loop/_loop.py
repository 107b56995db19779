"""The loop: chunks, the events that tell of them, and the checkpoints at the end of events."""

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from functrain.common import _tree
from functrain.common._types import PyTree, traits_of
from functrain.data._batches import Batches, Chunk
from functrain.distributed._stopping import StopAgreement
from functrain.engine import _placement, _rows
from functrain.engine._chunks import chunks
from functrain.engine._driver import Driver, copy_arrays
from functrain.engine._plan import Plan
from functrain.engine._position import Position
from functrain.engine._programs import compute_metrics
from functrain.engine._signals import DeferredSignals
from functrain.engine._trigger import Trigger, steps_until_due
from functrain.loop._events import (
    ChunkBegin,
    ChunkEnd,
    EpochBegin,
    EpochEnd,
    Event,
    LogsReady,
    RunEnd,
)
from functrain.loop._require import require_batches
from functrain.loop._saving import Resumed, Saving
from functrain.metrics._metric import Metered


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """Takes a state through the chunks of all epochs.

    Args:
      carry: The first state, which the loop takes over.
      driver: Runs the programs.
      step: The step, for its metrics.
      batches: The data.
      plan: Chooses K.
      boundaries: Triggers at whose steps a chunk ends.
      position: Where the run begins.
      epochs: Number of the epoch to stop before.
      late_logs: Whether to yield `LogsReady`.
      sharding: Of one batch, or None.
      no_metrics: Metrics that have seen nothing; None if the step has none.
      saving: Called after everyone else has handled an event, or None.
      resumed: What the checkpoint said that the run resumes from, or None.
      stopping: Agrees with other processes on the last event, or None.
      like_keras: True yields `EpochBegin` and `ChunkBegin` as well, and ends an epoch that is
        stopped by `EpochEnd`.

    Attributes:
      position: How far the training has come.
      resumed: Where it was resumed, without the arrays that were read.
    """

    carry: dataclasses.InitVar[PyTree]
    driver: Driver
    step: Any
    batches: Batches
    plan: Plan
    boundaries: tuple[Trigger, ...]
    position: Position
    epochs: int
    late_logs: bool
    sharding: NamedSharding | None
    no_metrics: PyTree
    saving: Saving | None
    resumed: Resumed | None
    stopping: StopAgreement | None
    like_keras: bool = False

    def __post_init__(self, carry: PyTree) -> None:
        resumed = self.resumed
        self._of_members = traits_of(self.step).is_population
        self._epoch_end_is_pending = resumed is not None and resumed.epoch_end_is_pending
        self._epoch_is_over = resumed is not None and resumed.nothing_left
        self._log_names: dict[Any, list[tuple[int, str]]] = {}
        self.driver.begin(self._with_metrics(carry, None if resumed is None else resumed.metrics))
        # The driver owns the arrays that were read.
        self.resumed = resumed and dataclasses.replace(resumed, state=(), metrics=None)
        self._prepared: Iterator[Chunk] | None = None  # the chunks of the next epoch
        self._unread: tuple[Position, Chunk, PyTree] | None = None  # the last chunk, for its logs
        self._open: Event | None = None  # being handled: its state may have been replaced
        self._last_values = {} if resumed is None else resumed.values  # of the last event

    @property
    def state(self) -> PyTree:
        """The state as it is now; the next program consumes it."""
        return _without_metrics(self.driver.carry)

    def last_whole(self) -> tuple[PyTree, Position] | None:
        """Returns the last whole state and its position; see `Run`."""
        if self._open is not None:
            with contextlib.suppress(Exception):  # the error that came first is the one to see
                self._continue_from(self._open)
        whole = self.driver.last_whole(self.position)
        return None if whole is None else (_without_metrics(whole[0]), whole[1])

    def unread_logs(self) -> LogsReady | None:
        """Returns the logs of the last chunk, after an error, if their event has not come yet."""
        unread, self._unread = self._unread, None
        return None if unread is None else self._logs(*unread)

    def save(self, *, epoch_is_over: bool | None = None) -> None:
        """Saves the run as the last event was left, due or not; see `Run`."""
        event = self._open
        if self.saving is None or event is None:
            raise ValueError("save: expected a run with a checkpointer, and an event, got none")
        self._continue_from(event)
        is_over = self._epoch_is_over if epoch_is_over is None else epoch_is_over
        self.saving.save(event, self._to_save(), epoch_is_over=is_over)

    def act_within_event(self, signals: DeferredSignals) -> None:
        """Acts on a signal while an event is handled; see `Run`."""
        event, saving = self._open, self.saving
        is_asked_to_end = saving is not None and saving.is_asked_to_end()
        if event is None or not (is_asked_to_end or signals.is_pending):
            return
        if any(map(_tree.is_deleted, jax.tree.leaves(event.state))):
            return  # in the hands of someone else: nothing to save until the event is over
        if saving is not None and (is_asked_to_end or jax.process_count() == 1):
            self.save(epoch_is_over=False)
        if saving is not None and is_asked_to_end:
            saving.end()
        signals.handle_pending()

    def events(self) -> Generator[Any, None, None]:
        """Yields the events of the run, once."""
        with contextlib.ExitStack() as stack:
            for context in (self.saving, self.stopping):
                if context is not None:
                    stack.enter_context(context)
            is_stopped = False
            is_over = self.resumed is not None and self.resumed.nothing_left
            while not is_over and self.position.epoch < self.epochs:
                is_stopped = yield from self._epoch()
                if is_stopped or self.position.epoch + 1 == self.epochs:
                    break
                self.position = Position(self.position.step, self.position.epoch + 1)
                self.driver.begin(self._with_metrics(self.state))
            yield from self._end(is_stopped)

    def _epoch(self) -> Generator[Any, None, bool]:
        """Yields the events of an epoch; returns True if the run stops there."""
        self._epoch_is_over, taken, is_stopped = False, 0, False
        if self.like_keras:
            begin_epoch = EpochBegin(**self._event_fields())
            yield from self._tell(begin_epoch)
            if begin_epoch._spare is None:
                self.driver.keep_spare(self.position, force=True)
        if self._prepared is None:
            self._prepared = self._begin_epoch(self.position)
        for chunk in self._prepared:
            if self.like_keras:
                begin = ChunkBegin(**self._event_fields(), chunk=chunk._replace(batches=None))
                yield from self._tell(begin)
            event = yield from self._run(chunk)
            taken += chunk.steps
            yield from self._tell(event)
            is_stopped = self._is_last(event)
            if is_stopped:
                break
            yield from self._save_if_due(event)
            self.driver.keep_spare(self.position)
        self._prepared = None
        if is_stopped and not self.like_keras:
            yield from self._logs_now()
            return True
        return (yield from self._end_epoch(taken, is_stopped))

    def _run(self, chunk: Chunk) -> Generator[LogsReady, None, ChunkEnd]:
        """Dispatches a chunk's program, yields the logs of the one before, returns the event."""
        if self.stopping is not None:  # tells the other processes how far this one is
            self.stopping.started += chunk.steps
        rows = self.driver.run(chunk)
        if self.stopping is not None:
            self.stopping.dispatched += chunk.steps
        self.position = self.position.after(chunk.steps)
        chunk, last = chunk._replace(batches=None), self._unread
        if self.late_logs:  # before the first yield, whose caller may raise
            self._unread = self.position, chunk, rows
        if last is not None:
            yield self._logs(*last)
        return ChunkEnd(
            **self._event_fields(),
            steps=chunk.steps,
            examples=chunk.examples,
            rows=rows,
            marks=chunk.marks,
        )

    def _end_epoch(self, taken: int, is_stopped: bool) -> Generator[Any, None, bool]:
        """Yields the event of an epoch's end; returns True if the run stops there.

        Args:
          taken: Chunks' steps of this epoch that this run has taken.
          is_stopped: Whether the run was stopped within the epoch.
        """
        if not self.like_keras:  # which reports such epochs, with a warning of its own
            require_batches(taken or self.position.batch, f" in epoch {self.position.epoch}")
        self._prepare_next_epoch()
        yield from self._logs_now()
        if not (taken or self._epoch_end_is_pending or self.like_keras):
            return False  # the epoch was over where the run began
        self._epoch_end_is_pending, self._epoch_is_over = False, True
        event = EpochEnd(**self._event_fields(), stopped=is_stopped)
        yield from self._tell(event)
        is_stopped = self._is_last(event)
        if not is_stopped and self.position.epoch + 1 < self.epochs:
            yield from self._save_if_due(event)
        return is_stopped

    def _end(self, is_stopped: bool) -> Iterator[Event]:
        """Yields the last event; saves the last state, and the one that hooks chose instead."""
        trees, values = self._to_save(), self._last_values
        event = RunEnd(**self._event_fields(), was_stopped=is_stopped)
        yield from self._tell(event)
        is_finished = self.resumed is not None and self.resumed.finished
        has_run = self.position.epoch < self.epochs
        if self.saving is not None and has_run and not is_finished:
            if event.state is not trees["state"]:
                trees["final"] = event.state
            self.saving.save(
                dataclasses.replace(event, values={**values, **event.values}),
                trees,
                epoch_is_over=self._epoch_is_over,
                done={"epochs": self.epochs, "stopped": is_stopped},
            )

    def _tell(self, event: Event) -> Iterator[Event]:
        """Yields an event, and continues from the state that it was left with."""
        self._open = event
        yield event
        self._open, self._last_values = None, event.values
        self._continue_from(event)

    def _is_last(self, event: Event) -> bool:
        """Returns True if the run stops after this event, in all processes."""
        return event.stopped if self.stopping is None else self.stopping.is_last(event.stopped)

    def _save_if_due(self, event: Event) -> Iterator[LogsReady]:
        """Calls the hook that saves, after the logs that belong to the checkpoint have come."""
        saving = self.saving
        if saving is None:
            return
        is_asked_to_end = saving.is_asked_to_end()
        if is_asked_to_end or saving.is_due(event):
            yield from self._logs_now()
            saving.save(event, self._to_save(), epoch_is_over=self._epoch_is_over)
        if is_asked_to_end:
            saving.end()

    def _to_save(self) -> dict[str, PyTree]:
        """Returns what a checkpoint holds: the state, and within an epoch its metrics so far."""
        trees = {"state": self.state}
        if self.no_metrics is not None and not self._epoch_is_over:
            trees["metrics"] = self.driver.carry.metrics
        return trees

    def _logs_now(self) -> Iterator[LogsReady]:
        logs = self.unread_logs()
        if logs is not None:
            yield logs

    def _begin_epoch(self, position: Position) -> Iterator[Chunk]:
        """Yields the chunks of an epoch, from a batch of it on."""
        steps_before = position.step - position.batch

        def until_due(batch: int) -> int | None:
            return steps_until_due(self.boundaries, steps_before + batch)

        self.batches.begin(position.epoch, position.batch)
        yield from chunks(self.batches, self.plan, until_due, start=position.batch)

    def _prepare_next_epoch(self) -> None:
        """Makes the next epoch's first chunk while the device is busy with the last of this one.

        Only if the data can seek: else they may not be asked before the epoch begins.
        """
        next_epoch = Position(self.position.step, self.position.epoch + 1)
        if self.batches.can_seek and next_epoch.epoch < self.epochs:
            following = self._begin_epoch(next_epoch)
            first = list(itertools.islice(following, 1))
            self._prepared = itertools.chain(first, following)

    def _with_metrics(self, state: PyTree, metrics: PyTree = None) -> PyTree:
        """Puts metrics beside a state if the step has some: by default such that saw nothing."""
        if self.no_metrics is None:
            return state
        metrics = self.no_metrics if metrics is None else metrics
        return Metered(state, _placement.replicate_beside(copy_arrays(metrics), state))

    def _event_fields(self) -> dict[str, Any]:
        """Returns what every event says."""
        fields = {"position": self.position, "state": self.state, "_of_members": self._of_members}
        if self.no_metrics is not None:
            step, metrics = self.step, self.driver.carry.metrics
            fields["_metrics"] = lambda: compute_metrics(step, metrics)
        return fields

    def _logs(self, position: Position, chunk: Chunk, rows: PyTree) -> LogsReady:
        """Fetches the numbers that each step of a chunk reported."""
        leaves, structure = jax.tree.flatten(rows)
        if structure not in self._log_names:  # paths are slow to make, and the same each time
            self._log_names[structure] = [
                (i, path)
                for i, (path, x) in enumerate(_tree.leaves_with_path(rows))
                if _rows.is_scalar_per_step(x, self._of_members)
            ]
        names = self._log_names[structure]
        values = _rows.fetch_rows([leaves[i] for i, _ in names], chunk.steps)
        logs = {name: x for (_, name), x in zip(names, values, strict=True)}
        return LogsReady(position=position, steps=chunk.steps, examples=chunk.examples, logs=logs)

    def _continue_from(self, event: Event) -> None:
        """Continues with the state that an event was left with; copies it if it was replaced."""
        state = event.state
        if state is self.state:
            return
        if not event._is_handed_over:
            changed = _tree.differences(self.state, state)
            if changed:
                raise ValueError(
                    "event.state: expected a state of the structure, shapes and dtypes it had, got"
                    f"\n{_tree.bullets(changed)}"
                )
            state = _placement.place_on_mesh(_tree.copy(state), self.sharding)
        has_metrics = isinstance(self.driver.carry, Metered)
        self.driver.begin(self.driver.carry.replace(state=state) if has_metrics else state)
        if event._spare is not None:
            self.driver.adopt_spare(event._spare, self.position)


def _without_metrics(carry: PyTree) -> PyTree:
    return carry.state if isinstance(carry, Metered) else carry
