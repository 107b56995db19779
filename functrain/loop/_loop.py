"""The loop itself: chunks, what is told of them, and what is saved."""

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.data._sources import Source
from functrain.distributed._stopping import StopAgreement
from functrain.engine import _placement, _rows
from functrain.engine._chunks import Chunk, chunked
from functrain.engine._driver import Driver, copied
from functrain.engine._plan import Plan
from functrain.engine._position import Position
from functrain.engine._programs import computed
from functrain.engine._trigger import Trigger, steps_until_due
from functrain.loop._events import ChunkEnd, EpochEnd, Event, LogsReady, RunEnd
from functrain.loop._require import require_batches
from functrain.loop._saving import Resumed, Saving
from functrain.metrics._metric import Metered


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """Takes a state through the chunks of all epochs.

    Attributes:
      position: How far the training has come.
      resumed: Where it went on, if it did; without what was read there.
    """

    carry: dataclasses.InitVar[PyTree]
    driver: Driver
    step: Any
    source: Source
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

    def __post_init__(self, carry: PyTree) -> None:
        resumed = self.resumed
        self._of_members = getattr(self.step, "is_population", False)
        self._owes_epoch_end = resumed is not None and resumed.owes_epoch_end
        self._epoch_over = resumed is not None and resumed.nothing_left
        self._names: dict[Any, list[tuple[int, str]]] = {}
        self.driver.begin(self._metered(carry, None if resumed is None else resumed.metrics))
        # Not what was read: it is the driver's now.
        self.resumed = resumed and dataclasses.replace(resumed, state=(), metrics=None)
        self._chunks = self._begin_pass(self.position)
        self._late: tuple[Position, Chunk, PyTree] | None = None
        self._open: Event | None = None  # its state may have been replaced
        self._values = {} if resumed is None else resumed.values  # of the last event

    def last_whole(self) -> tuple[PyTree, Position] | None:
        """Returns the last whole state and its position; see `Run`."""
        if self._open is not None:
            with contextlib.suppress(Exception):  # the error that came first is the one to see
                self._go_on_from(self._open.state)
        found = self.driver.last_whole(self.position)
        return found and (_bare(found[0]), found[1])

    def unread_logs(self) -> LogsReady | None:
        """Returns the logs of the last chunk, after an error, if their event has not come yet."""
        late, self._late = self._late, None
        return None if late is None else self._logs(*late)

    def save(self) -> None:
        """Saves the run as the last event was left, due or not."""
        event = self._open
        if self.saving is None or event is None:
            raise ValueError("save: expected a run with a checkpointer, and an event, got none")
        self._go_on_from(event.state)
        self.saving.save(event, self._trees(), epoch_over=self._epoch_over)

    def events(self) -> Generator[Any, None, None]:
        """Yields the events of the run, once."""
        nothing = contextlib.nullcontext()
        with (
            nothing if self.saving is None else self.saving,
            nothing if self.stopping is None else self.stopping,
        ):
            stopped = False
            while not (self.resumed and self.resumed.nothing_left):
                stopped = yield from self._epoch()
                if stopped or self.position.epoch + 1 == self.epochs:
                    break
                self.position = Position(self.position.step, self.position.epoch + 1)
                self.driver.begin(self._metered(self.state))
            yield from self._end(stopped)

    def _end(self, stopped: bool) -> Iterator[Event]:
        """Tells that the run is over; the last state is saved, and the one hooks chose instead."""
        event, last, values = RunEnd(**self._moment()), self._trees(), self._values
        yield from self._told(event)
        if self.saving is not None and not (self.resumed and self.resumed.finished):
            chosen = {} if event.state is last["state"] else {"final": event.state}
            done = {"epochs": self.epochs, "stopped": stopped}
            end = dataclasses.replace(event, values={**values, **event.values})
            self.saving.save(end, {**last, **chosen}, epoch_over=self._epoch_over, done=done)

    def _epoch(self) -> Generator[Any, None, bool]:
        self._epoch_over, taken = False, 0
        for chunk in self._chunks:
            rows = self._run(chunk)
            self.position, taken = self.position.after(chunk.steps), taken + chunk.steps
            late = self._late
            if self.late_logs:  # before anybody is told anything: it may raise
                self._late = self.position, chunk._replace(batches=None), rows
            if late is not None:
                yield self._logs(*late)
            moment = self._moment()
            event = ChunkEnd(**moment, steps=chunk.steps, examples=chunk.examples, rows=rows)
            yield from self._told(event)
            if self._stops_after(event):
                yield from self._due_logs()
                return True
            yield from self._saved(event)
            self.driver.keep_spare(self.position)
        require_batches(taken or self.position.batch, f" in epoch {self.position.epoch}")
        self._prepare_next_epoch()
        yield from self._due_logs()
        if not (taken or self._owes_epoch_end):  # the epoch was over where the run began
            return False
        self._owes_epoch_end, self._epoch_over = False, True
        end = EpochEnd(**self._moment())
        yield from self._told(end)
        stopped = self._stops_after(end)
        if not stopped and self.position.epoch + 1 < self.epochs:
            yield from self._saved(end)
        return stopped

    def _run(self, chunk: Chunk) -> PyTree:
        """Takes a chunk's steps; tells the other processes how far this one is."""
        if self.stopping is None:
            return self.driver.run(chunk)
        self.stopping.begun += chunk.steps
        rows = self.driver.run(chunk)
        self.stopping.dispatched += chunk.steps
        return rows

    def _stops_after(self, event: Event) -> bool:
        """Returns True if the run stops here, in all processes."""
        return event.stopped if self.stopping is None else self.stopping.is_last(event.stopped)

    def _saved(self, event: Event) -> Iterator[LogsReady]:
        """Saves the run, if that is due or the process is to end."""
        saving = self.saving
        if saving and ((to_end := saving.is_asked_to_end()) or saving.is_due(event)):
            yield from self._due_logs()
            saving.save(event, self._trees(), epoch_over=self._epoch_over)
            if to_end:
                saving.act()

    def _trees(self) -> dict[str, PyTree]:
        """Returns what is to be saved: in mid-epoch the metrics, too."""
        metered = self.no_metrics is not None and not self._epoch_over
        return {"state": self.state, **({"metrics": self.driver.carry.metrics} if metered else {})}

    def _told(self, event: Event) -> Iterator[Event]:
        """Yields an event, and goes on with the state it was left with."""
        self._open = event
        yield event
        self._open, self._values = None, event.values
        self._go_on_from(event.state)

    def _due_logs(self) -> Iterator[LogsReady]:
        if (found := self.unread_logs()) is not None:
            yield found

    def _begin_pass(self, at: Position) -> Iterator[Chunk]:
        before = at.step - at.batch  # steps taken before this epoch

        def until(batch: int) -> int | None:
            return steps_until_due(self.boundaries, before + batch)

        start, where = at.batch, f"epoch {at.epoch}"
        for batches in self.source.passes(at.epoch, at.batch):
            for chunk in chunked(batches, self.plan, until, where=where, start=start):
                start += chunk.steps
                yield chunk

    def _prepare_next_epoch(self) -> None:
        """Makes the next epoch's first chunk while the device is busy with the last of this.

        Where batches can be asked for at any time; else the pass begins when the epoch does.
        """
        at = Position(self.position.step, self.position.epoch + 1)
        self._chunks = chunks = self._begin_pass(at)
        if self.source.can_seek and at.epoch < self.epochs:
            self._chunks = itertools.chain(list(itertools.islice(chunks, 1)), chunks)

    @property
    def state(self) -> PyTree:
        """The state as it is now; the next program consumes it."""
        return _bare(self.driver.carry)

    def _metered(self, state: PyTree, metrics: PyTree = None) -> PyTree:
        """Puts metrics beside a state, where the step has some: by default such as saw nothing."""
        if self.no_metrics is None:
            return state
        metrics = self.no_metrics if metrics is None else metrics
        return Metered(state, _placement.beside(copied(metrics), state))

    def _moment(self) -> dict[str, Any]:
        """Returns what every event says."""
        known = {"position": self.position, "state": self.state, "_of_members": self._of_members}
        if self.no_metrics is not None:
            step, metrics = self.step, self.driver.carry.metrics
            known["_metrics"] = lambda: computed(step, metrics)
        return known

    def _logs(self, position: Position, chunk: Chunk, rows: PyTree) -> LogsReady:
        leaves, structure = jax.tree.flatten(rows)
        if structure not in self._names:  # once: paths are slow, and the same each time
            found, of = enumerate(_tree.leaves_with_path(rows)), self._of_members
            self._names[structure] = [(i, p) for i, (p, x) in found if _rows.is_number(x, of)]
        names = self._names[structure]
        values = _rows.on_host([leaves[i] for i, _ in names], chunk.steps)
        logs = {name: x for (_, name), x in zip(names, values, strict=True)}
        return LogsReady(position=position, steps=chunk.steps, examples=chunk.examples, logs=logs)

    def _go_on_from(self, state: PyTree) -> None:
        """Goes on with the state an event was left with."""
        if state is self.state:
            return
        changed = _tree.differences(self.state, state)
        if changed:
            raise ValueError(
                "event.state: expected a state of the structure, shapes and dtypes it had, got\n"
                f"{_tree.bullets(changed)}"
            )
        new = _placement.on_mesh(_tree.copy(state), self.sharding)
        metered = isinstance(self.driver.carry, Metered)
        self.driver.begin(self.driver.carry.replace(state=new) if metered else new)


def _bare(carry: PyTree) -> PyTree:
    return carry.state if isinstance(carry, Metered) else carry
