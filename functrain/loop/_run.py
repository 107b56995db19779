"""The loop as a generator: it steps, the caller decides what happens in between."""

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from functrain.checkpoint._checkpointer import Checkpointer
from functrain.common import _tree
from functrain.common._types import PyTree, Step
from functrain.data._sources import Source
from functrain.engine import _placement, _rows
from functrain.engine._chunks import Chunk, chunked
from functrain.engine._driver import Driver, copied
from functrain.engine._plan import FuseArg, Plan, nbytes
from functrain.engine._position import Position, require_position
from functrain.engine._trigger import Trigger, steps_until_due
from functrain.loop._compute import computed
from functrain.loop._events import ChunkEnd, EpochEnd, Event, LogsReady, RunEnd
from functrain.loop._require import require_batches, require_epochs, require_state
from functrain.loop._saving import Part, Resumed, Saving
from functrain.metrics._metric import Metered
from functrain.rewrites import Mode
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep


def run(
    state: PyTree,
    step: Step[Any],
    data: Any,
    *,
    epochs: int = 1,
    start: Position | None = None,
    fuse: FuseArg = "auto",
    boundaries: Iterable[Trigger] = (),
    rewrites: Mode = "auto",
    sharding: _placement.ShardingArg = None,
    jit: bool = True,
    donate: bool = False,
    late_logs: bool = False,
    checkpointer: Checkpointer | None = None,
) -> "Run":
    """Yields an event after every program and every epoch: the loop, for those who own theirs.

    Nothing waits for the device but a bound on how far the loop may run ahead: while one program
    computes, the next chunk is made.

    Args:
      state: Any pytree of arrays. Copied once, so the caller's stays alive.
      step: ``(state, batch) -> (state, logs)``, not jitted. One with metrics starts afresh each
        epoch; events carry the bare state.
      data: An `ArrayLoader`, or an iterable of batches (for more than one epoch, one that can be
        iterated again). Batches are pytrees of NumPy or jax arrays, or of tensors that
        `np.asarray` takes; they reach the step in their own dtype, so that bytes can be cast and
        scaled on the device.
      epochs: Number of the epoch to stop before: how many there are in the whole training.
      start: Where to begin, to go on where another run ended; the beginning for None. A loader's
        order is a function of the epoch, so that the rest of a run is the run's rest, in
        mid-epoch too. Of other data the first batches of the epoch are fetched and left out.
      fuse: Steps per program, K. ``"auto"`` takes at most 128, and fewer where the epoch is
        short, the state is large or the batches are (8 at the least, if they fit into 64 MiB).
        K batches are in memory at once, two or three times over. Results do not depend on K.
      boundaries: Triggers (`every`, `at`) at whose steps a chunk must end. The same program takes
        fewer steps then: nothing further is compiled.
      rewrites: Which slow operations to rewrite on CPU; see `fuse`.
      sharding: Of one batch, such as ``NamedSharding(mesh, PartitionSpec("data"))``, or a mesh of
        one axis; a chunk's leading axis is added. The state keeps the shardings it has; what is on
        no particular device goes to all of the mesh.
      jit: False runs every step by itself, uncompiled, for debugging: prints and breakpoints in
        the step see values.
      donate: Take over the state instead of copying it: for states that fit into memory but
        once. The one passed in is CONSUMED.
      late_logs: Whether to yield `LogsReady` as well: each chunk's logs on the host, one chunk
        later, for whoever writes them down.
      checkpointer: A `Checkpointer`. The run goes on from its last checkpoint, if there is one, in
        mid-epoch too; it saves itself whenever that is due, at its end, and when SIGTERM comes,
        after which the process ends with 143. What is saved is what an event was left with.

    Returns:
      An iterator: `ChunkEnd` after every program, `EpochEnd` after every epoch, `RunEnd` at last.
      If a program fails, its ``last_whole()`` is the state to go on from.

    Raises:
      ValueError: No batches, batches that differ from the first or that the devices do not divide,
        more epochs than an iterator lasts, a `fuse` below 1, or an event was given a state that
        does not fit.
      TypeError: The data is no source of batches, or the step is not as `fuse` wants it.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> from functrain import ArrayLoader
      >>> def step(total, batch):
      ...     return total + jnp.sum(batch), {"total": total}
      >>> loader = ArrayLoader(np.ones(10, np.float32), batch_size=2)
      >>> for event in run(jnp.zeros(()), step, loader, fuse=2):
      ...     match event:
      ...         case ChunkEnd():
      ...             print(event.step, event.state)
      ...         case EpochEnd():
      ...             print("epoch", event.epoch, "is over")
      2 4.0
      4 8.0
      5 10.0
      epoch 0 is over
    """
    return begin(
        state,
        step,
        data,
        epochs=epochs,
        start=start,
        fuse=fuse,
        boundaries=boundaries,
        rewrites=rewrites,
        sharding=sharding,
        jit=jit,
        donate=donate,
        late_logs=late_logs,
        checkpointer=checkpointer,
    )


def begin(
    state: PyTree,
    step: Step[Any],
    data: Any,
    *,
    epochs: int,
    start: Position | None,
    fuse: FuseArg,
    boundaries: Iterable[Trigger],
    rewrites: Mode,
    sharding: _placement.ShardingArg,
    jit: bool,
    donate: bool,
    late_logs: bool,
    checkpointer: Checkpointer | None,
    parts: Mapping[str, Part] | None = None,
) -> "Run":
    """As `run`, with what else is to be saved and restored with it."""
    check_step(step)
    require_state(state)
    require_epochs(epochs)
    source, at = Source(data), require_position(start)
    if source.steps and at.batch >= source.steps:
        at = Position(at.step, at.epoch + 1)
    where = _placement.batch_sharding(sharding)
    _placement.require_divisible(source, where)
    no_metrics = step.start(()).metrics if isinstance(step, MeteredStep) else None
    carry = _placement.on_mesh(_tree.own(state) if donate else _tree.copy(state), where)
    resumed: Resumed | None = None
    saving = None if checkpointer is None else Saving(checkpointer, source, parts or {})
    with contextlib.ExitStack() as undo:
        if saving is not None:
            undo.callback(saving.close)
            source.watch()
            resumed = saving.resume(carry, no_metrics, epochs)
            at = at if resumed is None else resumed.position
        finished = resumed is not None and resumed.finished
        if at.epoch >= epochs and not finished:
            raise ValueError(
                f"epochs: expected more than the {at.epoch} that are over at start={tuple(at)}, "
                f"got {epochs}. It is the number of epochs of the whole training, counted from "
                "its beginning."
            )
        source.require_passes(epochs - at.epoch)
        triggers = (*boundaries, *([] if saving is None else [saving.when]))
        plan = Plan(
            fuse,
            state_bytes=nbytes(carry),
            stretches=lambda: [source.full_steps, steps_until_due(triggers, 0)],
        )
        place = _placement.chunk_placement(where)
        driver = Driver(step, rewrites=rewrites, jit=jit, place=place)
        if resumed is not None:
            carry = _tree.own(resumed.state)
        found = Run(
            driver,
            step,
            carry,
            source,
            plan,
            triggers,
            at,
            epochs,
            late_logs,
            where,
            no_metrics,
            saving,
            resumed,
        )
        undo.pop_all()
    if donate or resumed is not None:
        driver.keep_spare(at, now=True)
    else:
        driver.adopt_spare(state, at)  # the caller's, which is left alone
    return found


class Run(Iterator[Event]):
    """The events of a run, one by one, and the way back if a program fails; see `run`.

    Attributes:
      position: How far the training has come.
      resumed: Where it went on, if it did: its `position`, and whether it was `finished` already.

    Examples:
      >>> import jax.numpy as jnp
      >>> events = run(jnp.zeros(()), lambda total, x: (total + x, {}), [jnp.ones(())] * 3)
      >>> [type(event).__name__ for event in events]
      ['ChunkEnd', 'EpochEnd', 'RunEnd']
      >>> events.position
      Position(step=3, epoch=0, batch=3)
    """

    def __init__(
        self,
        driver: Driver,
        step: Any,
        state: PyTree,
        source: Source,
        plan: Plan,
        boundaries: tuple[Trigger, ...],
        start: Position,
        epochs: int,
        late_logs: bool,
        sharding: NamedSharding | None,
        no_metrics: PyTree,
        saving: Saving | None,
        resumed: Resumed | None,
    ) -> None:
        self.position = start
        self.resumed = resumed
        self._driver, self._step, self._source, self._plan = driver, step, source, plan
        self._boundaries, self._epochs, self._late_logs = boundaries, epochs, late_logs
        self._sharding = sharding
        self._no_metrics, self._saving = no_metrics, saving
        self._owes_epoch_end = resumed is not None and resumed.owes_epoch_end
        self._is_finished = resumed is not None and resumed.finished
        self._epoch_over = resumed is not None and resumed.nothing_left
        self._names: dict[Any, list[tuple[int, str]]] = {}
        driver.begin(self._metered(state, None if resumed is None else resumed.metrics))
        self._chunks = self._begin_pass(start)
        self._late: tuple[Position, Chunk, PyTree] | None = None
        self._open: Event | None = None  # its state may have been replaced
        self._values = {} if resumed is None else resumed.values  # of the last event
        self._events = self._run()

    def __next__(self) -> Event:
        """Takes the next chunk, where it is time for one, and returns what happened."""
        event: Event = next(self._events)
        return event

    def last_whole(self) -> tuple[PyTree, Position] | None:
        """Returns the last whole state and its position, after an error in the midst of a run.

        A program that fails takes the state along that it was given. Then it is the last copy, of
        at most some seconds ago; there are copies of states up to 256 MiB. None if there is none.
        A state that the last event was given counts, if it fits.
        """
        if self._open is not None:
            with contextlib.suppress(Exception):  # the error that came first is the one to see
                self._go_on_from(self._open.state)
        found = self._driver.last_whole(self.position)
        return None if found is None else (_bare(found[0]), found[1])

    def unread_logs(self) -> LogsReady | None:
        """Returns the logs of the last chunk, after an error, if their event has not come yet."""
        late, self._late = self._late, None
        return None if late is None else self._logs(*late)

    def save(self) -> None:
        """Saves the run as the last event was left, due or not.

        Logs that have not come yet are to be taken first, with `unread_logs`, where what is saved
        beside the state depends on them.

        Raises:
          ValueError: The run has no checkpointer, or no event has come yet.
        """
        event = self._open
        if self._saving is None or event is None:
            raise ValueError("save: expected a run with a checkpointer, and an event, got none")
        self._go_on_from(event.state)
        self._saving.save(event, self._trees(), epoch_over=self._epoch_over)

    def close(self) -> None:
        """Ends the run here; what is being written is waited for."""
        self._events.close()
        if self._saving is not None:
            self._saving.close()

    def _run(self) -> Generator[Any, None, None]:
        with contextlib.nullcontext() if self._saving is None else self._saving:
            stopped = False
            while not (self.resumed is not None and self.resumed.nothing_left):
                stopped = yield from self._epoch()
                if stopped or self.position.epoch + 1 == self._epochs:
                    break
                self.position = Position(self.position.step, self.position.epoch + 1)
                self._driver.begin(self._metered(self.state))
            yield from self._end(stopped)

    def _end(self, stopped: bool) -> Iterator[Event]:
        """Tells that the run is over; the last state is saved, and the one hooks chose instead."""
        event, last, values = RunEnd(**self._moment()), self._trees(), self._values
        yield from self._told(event)
        if self._saving is not None and not self._is_finished:
            chosen = {} if event.state is last["state"] else {"final": event.state}
            done = {"epochs": self._epochs, "stopped": stopped}
            end = dataclasses.replace(event, values={**values, **event.values})
            self._saving.save(end, {**last, **chosen}, epoch_over=self._epoch_over, done=done)

    def _epoch(self) -> Generator[Any, None, bool]:
        self._epoch_over, taken = False, 0
        for chunk in self._chunks:
            rows = self._driver.run(chunk)
            self.position, taken = self.position.after(chunk.steps), taken + chunk.steps
            late = self._late
            if self._late_logs:  # before anybody is told anything: it may raise
                self._late = self.position, chunk._replace(batches=None), rows
            if late is not None:
                yield self._logs(*late)
            moment = self._moment()
            event = ChunkEnd(**moment, steps=chunk.steps, examples=chunk.examples, rows=rows)
            yield from self._told(event)
            if event.stopped:
                yield from self._due_logs()
                return True
            yield from self._saved(event)
            self._driver.keep_spare(self.position)
        require_batches(taken or self.position.batch, f" in epoch {self.position.epoch}")
        self._prepare_next_epoch()
        yield from self._due_logs()
        stopped = False
        if taken or self._owes_epoch_end:  # else the epoch was over where the run began
            self._owes_epoch_end, self._epoch_over = False, True
            end = EpochEnd(**self._moment())
            yield from self._told(end)
            stopped = end.stopped
            if not stopped and self.position.epoch + 1 < self._epochs:
                yield from self._saved(end)
        if not self._source.can_seek:
            self._chunks = self._begin_pass(Position(self.position.step, self.position.epoch + 1))
        return stopped

    def _saved(self, event: Event) -> Iterator[LogsReady]:
        """Saves the run, if that is due or the process is to end."""
        saving = self._saving
        if saving is None or not (saving.is_asked_to_end or saving.is_due(event)):
            return
        yield from self._due_logs()
        saving.save(event, self._trees(), epoch_over=self._epoch_over)
        if saving.is_asked_to_end:
            saving.act()

    def _trees(self) -> dict[str, PyTree]:
        """Returns what is to be saved: in mid-epoch the metrics, too."""
        metered = self._no_metrics is not None and not self._epoch_over
        return {"state": self.state, **({"metrics": self._driver.carry.metrics} if metered else {})}

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
            return steps_until_due(self._boundaries, before + batch)

        batches, where = self._source.begin(at.epoch, at.batch), f"epoch {at.epoch}"
        yield from chunked(batches, self._plan, until, where=where, start=at.batch)

    def _prepare_next_epoch(self) -> None:
        """Makes the next epoch's first chunk while the device is busy with the last of this."""
        at = Position(self.position.step, self.position.epoch + 1)
        if self._source.can_seek and at.epoch < self._epochs:
            chunks = self._begin_pass(at)
            self._chunks = itertools.chain(list(itertools.islice(chunks, 1)), chunks)

    @property
    def state(self) -> PyTree:
        """The state as it is now; the next program consumes it."""
        return _bare(self._driver.carry)

    def _metered(self, state: PyTree, metrics: PyTree = None) -> PyTree:
        """Puts metrics beside a state, where the step has some: by default such as saw nothing."""
        if self._no_metrics is None:
            return state
        metrics = self._no_metrics if metrics is None else metrics
        return Metered(state, _placement.beside(copied(metrics), state))

    def _moment(self) -> dict[str, Any]:
        """Returns what every event says."""
        known = {"position": self.position, "state": self.state}
        if self._no_metrics is None:
            return known
        step, metrics = self._step, self._driver.carry.metrics
        return {**known, "_metrics": lambda: computed(step, metrics)}

    def _logs(self, position: Position, chunk: Chunk, rows: PyTree) -> LogsReady:
        leaves, structure = jax.tree.flatten(rows)
        if structure not in self._names:  # once: paths are slow, and the same each time
            paths = [path for path, _ in _tree.leaves_with_path(rows)]
            found = zip(range(len(paths)), paths, map(_rows.is_number, leaves), strict=True)
            self._names[structure] = [(i, path) for i, path, number in found if number]
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
        new = _placement.on_mesh(_tree.copy(state), self._sharding)
        metered = isinstance(self._driver.carry, Metered)
        self._driver.begin(self._driver.carry.replace(state=new) if metered else new)


def _bare(carry: PyTree) -> PyTree:
    return carry.state if isinstance(carry, Metered) else carry
