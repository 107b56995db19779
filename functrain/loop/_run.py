"""Begins a run: the state, the data and the last checkpoint become a loop."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from functrain.checkpoint._checkpointer import Checkpointer
from functrain.common import _tree
from functrain.common._checks import is_integer, require, require_flags, require_integer
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
from functrain.engine._trigger import Trigger, longest_interval, require_triggers
from functrain.loop._iterator import Run
from functrain.loop._loop import Loop
from functrain.loop._require import (
    require_epochs_left,
    require_state,
    require_training_step,
    require_values,
)
from functrain.loop._saving import Resumed, Saving
from functrain.rewrites import Mode
from functrain.step._metered import MeteredStep
from functrain.targets._chips import accelerator_of


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
    sharding: _placement.ShardingArg = None,
    jit: bool = True,
    donate: bool = False,
    late_logs: bool = False,
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
      late_logs: True yields `LogsReady` as well: the logs of each chunk on the host, one chunk
        later, for log files and progress bars.
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
    require_state(state)
    require_flags(jit=jit, donate=donate, late_logs=late_logs)
    require_training_step(step)
    require_integer("epochs", epochs, 0)
    batches, begin = batches_by_epoch(data, steps_per_epoch, start)
    # A new order for each of several runs in a loop; an explicit position implies its order.
    if start is None:
        batches.continue_after(steps_taken(state))
    return begin_run(
        state,
        step,
        batches,
        epochs=epochs,
        start=begin,
        fuse=fuse,
        boundaries=boundaries,
        rewrites=rewrites,
        sharding=sharding,
        jit=jit,
        donate=donate,
        late_logs=late_logs,
        saving=None if checkpointer is None else Saving(checkpointer, batches, {}),
    )


def batches_by_epoch(
    data: Any, steps_per_epoch: int | None, start: Position | None
) -> tuple[Batches, Position]:
    """Returns the batches of epochs of a given length or of one pass, and the first position."""
    batches, position = as_batches(data), require_position(start)
    if steps_per_epoch is None:
        return batches, position
    require_integer("steps_per_epoch", steps_per_epoch)
    epochs_of_steps = EpochsOfSteps(batches, int(steps_per_epoch))
    return epochs_of_steps, Position.from_step(position.step, steps_per_epoch)


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
) -> Run:
    """Returns the events of a run, as `run` does, for callers that save more than a state.

    The arguments are those of `run`, but for these: `saving` saves the run after an event has been
    handled, and resumes it. `plan` chooses K; by default it is made from `fuse`. `jit` may be a
    function that decides, given the shapes of the first batch. For `like_keras` see `Loop`.
    """
    traits_of(step).require_data(batches.data, batches.name)
    batches.find_examples_along(traits_of(step).example_axis())
    position = require_position(start)
    if batches.steps and position.batch >= batches.steps:
        expected = f"at most {batches.steps} batches in an epoch of {batches.name}"
        advice = "functrain.Position.from_step(step, steps_per_epoch) divides steps into epochs."
        require(position.batch == batches.steps, "start", expected, position, advice)
        # The end of an epoch is the beginning of the next one.
        position = Position(position.step, position.epoch + 1)
    batch_sharding = _placement.batch_sharding(sharding)
    _placement.require_divisible(batches, batch_sharding)
    triggers = require_triggers("boundaries", boundaries)
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
    # If an error occurs before the first event, the checkpoint directory must be released again.
    with contextlib.ExitStack() as undo:
        if saving is not None:
            undo.callback(saving.close)
            # Some data cannot seek, and must note their position from the first batch on.
            batches.track()
            # The caller's arrays show where to put those of the checkpoint. A copy would be a
            # second state in memory during the read, and so would a state that the run takes over.
            like = _placement.abstract_on_mesh(state, batch_sharding)
            is_consumed = donate and not like_keras
            release = functools.partial(_tree.delete, state) if is_consumed else None
            resumed = saving.resume(like, no_metrics, epochs, release=release)
            epochs = epochs if resumed is None else resumed.epochs
            triggers = (*triggers, saving.trigger)
        if resumed is not None:
            position, carry = resumed.position, _tree.copy_if_needed(resumed.state)
        elif like_keras:
            # The hook of bridge hands over its own state before the first step.
            carry = state
        else:
            require_values(state)
            owned = _tree.copy_if_needed(state) if donate else _tree.copy(state)
            carry = _placement.place_on_mesh(owned, batch_sharding)
        # Keras accepts a run without epochs, and so does `fit(epochs=0)`.
        if not (like_keras or resumed or (epochs == 0 and position == Position())):
            require_epochs_left(batches, position, epochs, f"start={tuple(position)}")
        batches.require_epochs(epochs - position.epoch)
        if plan is None:
            plan = Plan(
                fuse,
                state_bytes=nbytes(carry),
                intervals=lambda batch: [batches.full_steps, longest_interval(triggers)],
                chip=accelerator_of(carry),
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
            # Processes that share arrays or checkpoints must stop at the same step.
            stopping=new_stop_agreement(
                saving is not None or _placement.spans_processes(carry, batch_sharding)
            ),
            like_keras=like_keras,
        )
        # From here on, the run closes `saving`.
        undo.pop_all()
    return Run(loop)


def steps_taken(state: PyTree) -> int:
    """Returns the integer `step` of a state; 0 if it has none. Waits for the state.

    For a population, this is the largest count: stopped members have taken fewer steps.
    """
    # A population has the states of its members in `states`.
    step = getattr(getattr(state, "states", state), "step", None)
    is_array = isinstance(step, np.ndarray | np.generic | jax.Array)
    if not (is_array or is_integer(step, 0)) or _tree.is_deleted(step):
        return 0
    # Members of a population may lie on devices of other processes.
    counts = np.asarray(fetch_global(step))
    is_count = counts.dtype.kind in "iu" and counts.ndim == int(hasattr(state, "states"))
    return max(0, int(counts.max())) if is_count and counts.size else 0
