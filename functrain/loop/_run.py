"""A run, event by event: it steps, the caller decides what happens in between."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from functrain.checkpoint._checkpointer import Checkpointer
from functrain.common import _tree
from functrain.common._checks import is_integer, require_flags, require_integer
from functrain.common._gather import fetch_global
from functrain.common._types import PyTree, Step, traits_of
from functrain.data._adapt import as_batches
from functrain.data._batches import Batches
from functrain.data._epochs_of_steps import EpochsOfSteps
from functrain.distributed._stopping import new_stop_agreement
from functrain.engine import _placement
from functrain.engine._driver import Driver
from functrain.engine._plan import FuseArg, Plan, nbytes
from functrain.engine._position import Position, require_position
from functrain.engine._signals import DeferredSignals
from functrain.engine._trigger import Trigger, longest_interval
from functrain.loop._events import ChunkEnd, EpochEnd, Event, LogsReady
from functrain.loop._loop import Loop
from functrain.loop._require import require_state, require_training_step
from functrain.loop._saving import Resumed, Saving
from functrain.rewrites import Mode
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
      epochs: Number of the epoch to stop before, counted from the beginning of the training. That
        is this call where `start` is None.
      start: The position to continue from, as where another run ended. A loader's order is a
        function of the epoch, so the run takes the batches that the other one would have taken, in
        mid-epoch too. Of other data the first batches of the epoch are fetched and left out. With
        None, steps and epochs count from 0, and an `ArrayLoader` continues with the orders that
        come after ``state.step``: several runs in a loop see a new order each, those of one longer
        run. `Position()` begins with the first order. A state without an integer `step` of its
        own, such as a dict of states, begins with the first order as well.
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
      >>> from functrain.events import ChunkEnd, EpochEnd
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
    require_state(state)
    require_flags(jit=jit, donate=donate, late_logs=late_logs)
    require_training_step(step)
    require_integer("epochs", epochs)
    batches = as_batches(data)
    if start is None:
        batches.continue_after(steps_taken(state))
    return begin_run(
        state,
        step,
        batches,
        epochs=epochs,
        start=start,
        fuse=fuse,
        boundaries=boundaries,
        rewrites=rewrites,
        sharding=sharding,
        jit=jit,
        donate=donate,
        late_logs=late_logs,
        saving=None if checkpointer is None else Saving(checkpointer, batches, {}),
    )


def begin_run(
    state: PyTree,
    step: Step[Any],
    batches: Batches,
    *,
    epochs: int,
    start: Position | None = None,
    fuse: FuseArg = "auto",
    boundaries: Iterable[Trigger] = (),
    rewrites: Mode = "auto",
    sharding: _placement.ShardingArg = None,
    jit: bool | Callable[[PyTree], bool] = True,
    donate: bool = False,
    late_logs: bool = False,
    saving: Saving | None = None,
    plan: Plan | None = None,
    like_keras: bool = False,
) -> "Run":
    """Returns the events of a run: `run`, for those who save more than a state, and for Keras.

    Args:
      state: As for `run`, as is everything else that is not listed here.
      step: The step.
      batches: The data.
      epochs: Number of the epoch to stop before.
      start: The position to continue from.
      fuse: Steps per program.
      boundaries: Triggers at whose steps a chunk must end.
      rewrites: Which slow operations to rewrite.
      sharding: Of one batch.
      jit: As for `run`; or a function of the shapes of the first batch that returns it.
      donate: Whether to take over the state.
      late_logs: Whether to yield `LogsReady`.
      saving: Saves the run after everyone else has handled an event, and resumes it.
      plan: Chooses K; made of `fuse` by default.
      like_keras: See `Loop`.
    """
    traits_of(step).require_data(batches.data, batches.name)
    position = require_position(start)
    if batches.steps and position.batch >= batches.steps:
        position = Position(position.step, position.epoch + 1)
    batch_sharding = _placement.batch_sharding(sharding)
    _placement.require_divisible(batches, batch_sharding)
    triggers = tuple(boundaries)
    _placement.require_same_run(
        batches,
        batch_sharding,
        epochs=epochs,
        start=tuple(position),
        fuse=fuse,
        boundaries=triggers,
    )
    no_metrics = step.start(state).metrics if isinstance(step, MeteredStep) else None
    resumed: Resumed | None = None
    with contextlib.ExitStack() as undo:
        if saving is not None:
            undo.callback(saving.close)
            batches.track()
            # The caller's arrays tell a checkpoint where to put its own. They are copied only if
            # there is none: while it is read, a copy would be one state more in memory.
            like = _placement.place_on_mesh(_tree.copy_if_needed(state), batch_sharding)
            resumed = saving.resume(like, no_metrics, epochs)
            del like
            triggers = (*triggers, saving.trigger)
        if resumed is not None:
            position, carry = resumed.position, _tree.copy_if_needed(resumed.state)
        elif like_keras:
            carry = state  # the hook hands over its own before the first step
        else:
            owned = _tree.copy_if_needed(state) if donate else _tree.copy(state)
            carry = _placement.place_on_mesh(owned, batch_sharding)
        if not like_keras:  # which runs no epoch then
            _require_epochs_left(batches, position, epochs, resumed)
        batches.require_epochs(epochs - position.epoch)
        if plan is None:
            plan = Plan(
                fuse,
                state_bytes=nbytes(carry),
                intervals=lambda: [batches.full_steps, longest_interval(triggers)],
            )
        place = _placement.chunk_placer(batch_sharding)
        driver = Driver(step, rewrites=rewrites, jit=jit, place=place)
        loop = Loop(
            carry=carry,
            driver=driver,
            step=step,
            batches=batches,
            plan=plan,
            boundaries=triggers,
            position=position,
            epochs=epochs,
            late_logs=late_logs,
            sharding=batch_sharding,
            no_metrics=no_metrics,
            saving=saving,
            resumed=resumed,
            stopping=new_stop_agreement(
                saving is not None or _placement.spans_processes(carry, batch_sharding)
            ),
            like_keras=like_keras,
        )
        undo.pop_all()
    if like_keras:
        pass  # the first epoch begins with a copy
    elif donate or resumed is not None:
        driver.keep_spare(position, force=True)
    else:
        driver.adopt_spare(state, position)  # the caller's, which is left alone
    return Run(loop)


def steps_taken(state: PyTree) -> int:
    """Returns a state's own count of steps; 0 where it has none.

    Members of a population that were stopped have taken fewer: it is the largest count. Waits for
    the state.
    """
    step = getattr(getattr(state, "states", state), "step", None)
    is_array = isinstance(step, np.ndarray | np.generic | jax.Array)
    if not (is_array or is_integer(step, 0)) or _tree.is_deleted(step):
        return 0
    counts = np.asarray(fetch_global(step))
    is_count = counts.dtype.kind in "iu" and counts.ndim == int(hasattr(state, "states"))
    return max(0, int(counts.max())) if is_count and counts.size else 0


def _require_epochs_left(
    batches: Batches, position: Position, epochs: int, resumed: Resumed | None
) -> None:
    """Raises ValueError for a run that would be over where it begins."""
    if position.epoch < epochs or (resumed and resumed.finished):
        return
    place = f"start={tuple(position)}"
    if resumed is not None:
        place = f"step {position.step}, where {resumed.directory} goes on"
    unit, over, asked = "epochs", position.epoch, epochs
    if isinstance(batches, EpochsOfSteps):
        unit, over, asked = "steps", position.step, epochs * batches.steps
    raise ValueError(
        f"{unit}: expected more than the {over} that are over at {place}, got {asked}. It is the "
        f"number of {unit} of the whole training, counted from its beginning."
    )


class Run(Iterator[Event]):
    """The events of a run, one by one, and the way back if a program fails; see `run`.

    It is closed when nobody refers to it any more, as in a loop that is left with `break`: what is
    being written is waited for, and signals are handled as before.

    Examples:
      >>> import jax.numpy as jnp
      >>> events = run(jnp.zeros(()), lambda total, x: (total + x, {}), [jnp.ones(())] * 3)
      >>> [type(event).__name__ for event in events]
      ['ChunkEnd', 'EpochEnd', 'RunEnd']
      >>> events.position
      Position(step=3, epoch=0, batch=3)
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        # It refers to the loop, and to nothing that refers to it: no garbage collector, who may
        # come late and in any thread, has to find out that it is left.
        self._events = loop.events()

    def __repr__(self) -> str:
        return f"Run({self.position})"

    def __next__(self) -> Event:
        """Takes the next chunk, where it is time for one, and returns what happened."""
        event: Event = next(self._events)
        return event

    @property
    def position(self) -> Position:
        """How far the training has come."""
        return self._loop.position

    @property
    def resumed(self) -> Resumed | None:
        """Where it went on, if it did: its `position`, and whether it was `finished` already."""
        return self._loop.resumed

    @property
    def state(self) -> PyTree:
        """The state as it is now; the next program consumes it."""
        return self._loop.state

    def last_whole(self) -> tuple[PyTree, Position] | None:
        """Returns the last whole state and its position, after an error in the midst of a run.

        A program that fails takes the state along that it was given. Then it is the last copy, of
        at most some seconds ago; there are copies of states up to 256 MiB. None if there is none.
        A state that the last event was given counts, if it fits.
        """
        return self._loop.last_whole()

    def unread_logs(self) -> LogsReady | None:
        """Returns the logs of the last chunk, after an error, if their event has not come yet."""
        return self._loop.unread_logs()

    def save(self, *, epoch_is_over: bool | None = None) -> None:
        """Saves the run as the last event was left, due or not.

        Args:
          epoch_is_over: False at the end of an epoch saves the run as it was before that event,
            which is sent again when the run resumes.

        Logs that have not come yet are to be taken first, with `unread_logs`, where what is saved
        beside the state depends on them.

        Raises:
          ValueError: The run has no checkpointer, or no event has come yet.
        """
        self._loop.save(epoch_is_over=epoch_is_over)

    def handled(
        self,
        handle: Callable[[Event], None],
        handle_logs: Callable[[LogsReady], None] = lambda event: None,
        *,
        signals: DeferredSignals | None = None,
    ) -> Iterator[Event]:
        """Yields the events after they have been handled, and a signal has been acted on.

        A run that has a checkpointer saves itself before that.

        Args:
          handle: Called with each event but `LogsReady`.
          handle_logs: Called with each `LogsReady`, which is not yielded; after an error, with
            the logs of the last steps before it.
          signals: The signals that are held back.
        """
        try:
            for event in self:
                if isinstance(event, LogsReady):
                    handle_logs(event)
                    continue
                handle(event)
                can_save = isinstance(event, ChunkEnd | EpochEnd)
                if signals is not None and signals.is_pending and can_save:
                    # A signal comes to each of several processes at another step.
                    if self._loop.saving is not None and jax.process_count() == 1:
                        self._handle_unread(handle_logs)
                        self.save()
                    signals.handle_pending()
                yield event
        except BaseException:
            with contextlib.suppress(Exception):  # a program that failed has no logs
                self._handle_unread(handle_logs)
            raise

    def _handle_unread(self, handle_logs: Callable[[LogsReady], None]) -> None:
        logs = self.unread_logs()
        if logs is not None:
            handle_logs(logs)

    def act_within_event(self, signals: DeferredSignals) -> None:
        """Acts on a signal that has come while the end of an epoch is handled.

        A run that has a checkpointer saves itself as it was before the end of the epoch. Waits
        for the end of the event if its state is in use elsewhere.
        """
        self._loop.act_within_event(signals)

    def close(self) -> None:
        """Ends the run here; what is being written is waited for."""
        self._events.close()
        if self._loop.saving is not None:  # which a run that never began has not closed
            self._loop.saving.close()

    def __del__(self) -> None:
        if hasattr(self, "_events"):
            self.close()
