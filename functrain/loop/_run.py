"""Runs as iterators over events: the caller decides what happens between programs."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from functrain.checkpoint._checkpointer import Checkpointer
from functrain.common._types import PyTree, Step
from functrain.engine._placement import ShardingArg
from functrain.engine._plan import FuseArg
from functrain.engine._position import Position
from functrain.engine._trigger import Trigger
from functrain.loop._arguments import run_arguments
from functrain.loop._events import Event
from functrain.loop._loop import Loop
from functrain.loop._resuming import Resumed
from functrain.loop._saving import Saving
from functrain.rewrites import Mode


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
        # The loop does not refer back to this object, which so is closed when its last reference is
        # gone. In a cycle, it would wait for the garbage collector, which runs late and in any
        # thread.
        self._loop = loop
        # Also runs at the exit of the interpreter, before modules are cleared. `__del__` would run
        # afterwards, and fail.
        weakref.finalize(self, loop.close)

    def __repr__(self) -> str:
        return f"Run({self.position})"

    def __next__(self) -> Event:
        """Runs the next chunk, if one is due, and returns the next event."""
        return next(self._loop.events)

    @property
    def position(self) -> Position:
        """The progress of the training."""
        return self._loop.position

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

    def close(self) -> None:
        """Ends the run here, and waits until checkpoints are written."""
        self._loop.close()


def run(
    state: PyTree,
    step: Step[Any],
    data: Any,
    *,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    start: Position | None = None,
    fuse: FuseArg = "auto",
    boundaries: Iterable[Trigger] = (),
    rewrites: Mode = "auto",
    sharding: ShardingArg = None,
    jit: bool = True,
    donate: bool = False,
    checkpointer: Checkpointer | None = None,
) -> Run:
    """Yields an event after every program and every epoch, for those who write their own loop.

    The loop does not wait for the device, except to bound how far it runs ahead: while one program
    computes, the next chunk is made.

    Args:
      state: Any pytree of arrays. It is copied once, so that the caller's arrays stay alive.
      step: ``(state, batch) -> (state, logs)``, not jitted. The metrics of a step are reset at
        each epoch; events carry the state without metrics.
      data: An `ArrayLoader`, or an iterable of batches (for more than one epoch, one that can be
        iterated again). Batches are pytrees of NumPy or jax arrays, or of tensors that
        `np.asarray` accepts. Their dtypes are kept, so that bytes can be cast and scaled on the
        device. They may have a few different shapes, each of which costs a compilation or two.
      epochs: Number of the epoch to stop before, counted from the beginning of the training, which
        is this call if `start` is None. A run of 0 epochs takes no steps.
      steps_per_epoch: The length of an epoch, if it is not one pass over the data, which may be
        endless. Finite data is repeated as often as needed. Of `start`, only the step is used.
      start: The position to continue from, such as the one at which another run ended. A loader's
        order is a function of the epoch, so the run takes the batches that the other run would
        have taken, also in mid-epoch. For other data, the first batches of the epoch are fetched
        and skipped. With None, steps and epochs count from 0, and an `ArrayLoader` continues with
        the orders that follow ``state.step``: each of several runs in a loop sees a new order, as
        in one longer run. `Position()` begins with the first order, and so does a state without
        an integer `step`, such as a dict of states.
      fuse: Steps per program, K, but no more than there are between two pauses, such as the ends
        of epochs. ``"auto"`` chooses at most 128, and fewer if the state or the batches are large
        (at least 8, if they fit into 64 MiB). K batches are in memory at once, two or three times
        over. On CPU, results do not depend on K.
      boundaries: Triggers (`every`, `at`) at whose steps a chunk must end. On CPU, the same program
        then takes fewer steps, so that nothing is compiled again.
      rewrites: Which slow operations to rewrite; see `fuse`.
      sharding: The sharding of one batch, such as ``NamedSharding(mesh, PartitionSpec("data"))``,
        or a mesh with one axis; the leading axis of a chunk is added. Arrays of the state keep
        their shardings; those on no particular device are put on the whole mesh.
      jit: False runs every step separately and uncompiled, for debugging: prints and breakpoints
        in the step see values.
      donate: True takes over the state instead of copying it, for states that fit into memory only
        once. The state that you pass is CONSUMED, before a checkpoint is read.
      checkpointer: A `Checkpointer`. The run resumes from its last checkpoint if there is one, in
        mid-epoch too; then `state` may be abstract, from `jax.eval_shape`. It saves itself when
        that is due, at its end, and when SIGTERM arrives; the process then ends with status 143.
        The state is saved after you have handled the event. Call the iterator's ``close()`` if you
        leave it and keep a reference to it: until then it holds the directory and SIGTERM.

    Returns:
      An iterator: `ChunkEnd` after every program, `EpochEnd` after every epoch, `RunEnd` last.
      After an error of your loop or of the data, its ``last_complete_state()`` is the state to
      continue from; a program that fails leaves none.

    Raises:
      ValueError: There are no batches, they have other dtypes or ranks than the first, or do not
        divide over the devices, an iterator is exhausted before the last epoch, `fuse` is below 1,
        or an event was given a state that does not fit.
      TypeError: `data` is not a source of batches, or the step is not a function as above.

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
    arguments = run_arguments(
        state,
        step,
        data,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        start=start,
        fuse=fuse,
        boundaries=boundaries,
        rewrites=rewrites,
        sharding=sharding,
        jit=jit,
        donate=donate,
    )
    saving = None if checkpointer is None else Saving(checkpointer, arguments.batches, {})
    return Run(Loop(state, step, arguments, saving=saving))
