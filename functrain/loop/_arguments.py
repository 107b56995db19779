"""The arguments of a run, checked and converted once."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from functrain.common import _tree
from functrain.common._checks import (
    is_integer,
    is_number,
    require,
    require_integer,
    require_untraced,
)
from functrain.common._gather import fetch_global
from functrain.common._types import PyTree, traits_of
from functrain.common._wide_integers import require_integers_fit
from functrain.data._adapt import as_batches
from functrain.data._batches import Batches
from functrain.data._epochs_of_steps import EpochsOfSteps
from functrain.engine import _placement
from functrain.engine._fuse import Fused
from functrain.engine._plan import FuseArg, Plan, nbytes
from functrain.engine._position import Position, require_position
from functrain.engine._processes import require_same_run
from functrain.engine._programs import cached_program
from functrain.engine._trigger import Trigger, longest_interval
from functrain.rewrites import Mode
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep
from functrain.targets._chips import Chip, accelerator_of

# The part of an accelerator's memory that the data and the state may take together, for the data to
# be put there.
DATA_PART = 1 / 4


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RunArguments:
    """The arguments of a run, as `run_arguments` returns them: checked and converted.

    Attributes:
      batches: The data.
      epochs: Number of the epoch to stop before.
      position: The position to begin at.
      fuse: Steps per program, or "auto".
      boundaries: Triggers at whose steps a chunk ends.
      rewrites: Which slow operations to rewrite.
      sharding: The sharding of one batch.
      jit: False runs every step separately and uncompiled.
      donate: True takes over the state instead of copying it.
    """

    batches: Batches
    epochs: int
    position: Position
    fuse: FuseArg = "auto"
    boundaries: tuple[Trigger, ...] = ()
    rewrites: Mode = "auto"
    sharding: NamedSharding | None = None
    jit: bool = True
    donate: bool = False

    def new_plan(self, state: PyTree, carry_bytes: int) -> Plan:
        """Returns a plan for the batches, and puts them on an accelerator if they fit there.

        Args:
          state: The state that is on the device.
          carry_bytes: Size of what the programs change.
        """
        plan = Plan(
            self.fuse,
            state_bytes=carry_bytes,
            intervals=lambda: [self.batches.full_steps, longest_interval(self.boundaries)],
            chip=accelerator_of(state),
        )
        if plan.chip is not None:
            self._put_data_on_device(plan.chip, state)
        return plan

    def _put_data_on_device(self, chip: Chip, state: PyTree) -> None:
        """Puts arrays on an accelerator that the run has for itself, if they fit beside the state.

        Copying each chunk from the host took longer than its program on a GPU: 88 µs a step of an
        MLP for MNIST, whose program took 29 (H100).
        """
        is_alone = self.sharding is None and jax.process_count() == 1
        # The data go to the default device. From there, chunks would be moved to another one.
        own = _placement.sharding_of_scalars(state)
        is_default = own is None or own.device_set == jax.device_put(0).devices()
        if self.jit and is_alone and is_default:
            self.batches.put_on_device(int(DATA_PART * chip.memory_bytes) - nbytes(state))


def run_arguments(
    state: PyTree,
    step: Any,
    data: Any,
    *,
    epochs: int | None,
    steps_per_epoch: int | None,
    start: Position | None,
    boundaries: Iterable[Trigger],
    sharding: _placement.ShardingArg,
    steps: int | None = None,
    **options: Any,
) -> RunArguments:
    """Checks and converts the arguments of `run` and `fit`; `options` are the other fields."""
    require_untraced("state", state)
    require_training_step(step)
    # A later run of the same state sees new orders of the data. A position implies its order.
    steps_before = steps_taken(state) if start is None else 0
    batches, epochs, position = _divide_into_epochs(
        data, epochs, steps, steps_per_epoch, start, steps_before
    )
    traits_of(step).require_data(batches.data, batches.name)
    if batches.steps and position.batch >= batches.steps:
        expected = f"at most {batches.steps} batches in an epoch of {batches.name}"
        advice = "functrain.Position.from_step(step, steps_per_epoch) divides steps into epochs."
        require(position.batch == batches.steps, "start", expected, position, advice)
        # The end of an epoch is the beginning of the next one.
        position = Position(position.step, position.epoch + 1)
    if epochs or position != Position():
        require_epochs_left(batches, position, epochs, f"start={tuple(position)}")
    arguments = RunArguments(
        batches=batches,
        epochs=epochs,
        position=position,
        boundaries=tuple(boundaries),
        sharding=_placement.batch_sharding(sharding),
        **options,
    )
    if arguments.sharding is not None:
        _placement.require_divisible(batches, arguments.sharding)
        require_same_run(
            batches,
            arguments.sharding,
            epochs=epochs,
            start=tuple(position),
            fuse=arguments.fuse,
            boundaries=arguments.boundaries,
        )
    return arguments


def pass_arguments(data: Any, *, sharding: _placement.ShardingArg, **options: Any) -> RunArguments:
    """Checks and converts the arguments of `evaluate` and `predict`: one pass over all examples."""
    batches, batch_sharding = as_batches(data), _placement.batch_sharding(sharding)
    dropped = getattr(batches.data, "dropped", 0)
    expected = f"all of the data, not a loader that drops {dropped:,} examples"
    advice = "Make one with drop_remainder=False: batches may differ in size."
    require(not dropped, batches.name, expected, batches.data, advice)
    arguments = RunArguments(
        batches=batches, epochs=1, position=Position(), sharding=batch_sharding, **options
    )
    if batch_sharding is not None:
        require_same_run(batches, batch_sharding, fuse=arguments.fuse)
    return arguments


def _divide_into_epochs(
    data: Any,
    epochs: int | None,
    steps: int | None,
    steps_per_epoch: int | None,
    start: Position | None,
    steps_before: int,
) -> tuple[Batches, int, Position]:
    """Returns the batches, the number of epochs and the first position."""
    position = require_position(start)
    epochs = _count_epochs(epochs, steps, steps_per_epoch)
    length = steps if steps_per_epoch is None else steps_per_epoch
    if length is None:
        return as_batches(data, steps_before=steps_before), epochs, position
    # They may be numbers of NumPy.
    per_epoch, total = (None if x is None else int(x) for x in (steps_per_epoch, steps))
    batches = EpochsOfSteps(as_batches(data), per_epoch, total, steps_before)
    return batches, epochs, Position.from_step(position.step, length)


def _count_epochs(epochs: int | None, steps: int | None, steps_per_epoch: int | None) -> int:
    """Returns the number of epochs; raises ValueError for lengths that do not fit together."""
    if steps_per_epoch is not None:
        require_integer("steps_per_epoch", steps_per_epoch)
    if steps is None:
        epochs = 1 if epochs is None else epochs
        require_integer("epochs", epochs, 0)
        return int(epochs)
    if epochs is not None:
        raise ValueError(
            f"epochs and steps: expected one of them, got {epochs!r} and {steps!r}. Both are "
            "totals; to evaluate after every few steps, pass steps_per_epoch= with either."
        )
    require_integer("steps", steps)
    length = steps if steps_per_epoch is None else steps_per_epoch
    expected = f"a number that divides steps={steps}"
    require(steps % length == 0, "steps_per_epoch", expected, steps_per_epoch)
    return int(steps // length)


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


def own_state(state: PyTree, arguments: RunArguments) -> PyTree:
    """Returns a state that nothing else refers to: a copy, or the caller's with ``donate=True``."""
    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
    advice = "Pass the state itself: there is no checkpoint to resume from."
    require(not is_abstract, "state", "arrays with values", state, advice)
    owned = _tree.copy_if_needed(state) if arguments.donate else _tree.copy(state)
    return _placement.place_on_mesh(owned, arguments.sharding)


def require_constant(state: PyTree) -> None:
    """Raises an error unless a state can be a constant of a program: arrays and numbers only."""
    require_untraced("state", state)
    require_integers_fit(state, "state")
    advice = (
        "Make a state with functrain.TrainState.create(params=..., tx=tx), of a Keras model with "
        "bridge.create_state(model, tx); of what fit returns, pass its state."
    )
    for path, leaf in _tree.leaves_with_path(state):
        is_valid = _tree.is_array(leaf) or is_number(leaf)
        require(is_valid, "state", f"an array at {path}", leaf, advice, error=TypeError)


def require_training_step(step: Any) -> None:
    """Raises TypeError unless a step is a function of a state and a batch that trains.

    Steps that only evaluate, and fused steps, are rejected as well.
    """
    # What is cached is that there was no error: reading a signature takes a tenth of a short fit.
    cached_program(step, "checked", lambda _: check_step(step))
    if isinstance(step, MeteredStep) and not step.trains:
        raise TypeError(
            "step: expected a step that trains, from functrain.train_step(loss_fn, tx), got one "
            "from functrain.eval_step. To measure, call functrain.evaluate(state, step, data)."
        )
    if isinstance(step, Fused):
        raise TypeError(
            f"step: expected (state, batch) -> (state, logs), got {step!r}. Pass the step itself "
            f"and fuse={step.k}."
        )


def require_batches(count: int, place: str = "", *, name: str = "data") -> None:
    """Raises ValueError if a pass over data had no batch; `place` names the pass."""
    if not count:
        raise ValueError(
            f"{name}: expected at least one batch{place}, got none. An iterator or generator is "
            "exhausted after one pass: pass an object that can be iterated again."
        )


def require_epochs_left(batches: Batches, position: Position, epochs: int, place: str) -> None:
    """Raises ValueError if a run would end before the place where it begins.

    Args:
      batches: The data of the run.
      position: The position to begin at.
      epochs: The number of epochs of the training.
      place: A description of the position.
    """
    if position.epoch < epochs:
        return
    unit, done, requested = "epochs", position.epoch, epochs
    # With `fit(steps=)`, the caller counts steps.
    if isinstance(batches, EpochsOfSteps) and batches.total is not None:
        unit, done, requested = "steps", position.step, batches.total
    raise ValueError(
        f"{unit}: expected more than the {done} that are over at {place}, got {requested}. Pass "
        f"the number of {unit} of the whole training, counted from its beginning."
    )
