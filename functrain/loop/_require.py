"""Checks of states, steps and data that run, evaluate and predict share."""

from typing import Any

from functrain.common import _repr, _tree
from functrain.common._checks import is_number, require, require_untraced
from functrain.common._types import PyTree
from functrain.common._wide_integers import require_integers_fit
from functrain.data._batches import Batches
from functrain.data._epochs_of_steps import EpochsOfSteps
from functrain.engine._fuse import Fused
from functrain.engine._position import Position
from functrain.engine._programs import has_programs
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep


def require_constant(state: PyTree) -> None:
    """Raises an error unless a state can be a constant of a program: arrays and numbers only."""
    require_untraced("state", state)
    require_integers_fit(state, "state")
    for path, leaf in _tree.leaves_with_path(state):
        is_valid = _tree.is_array(leaf) or is_number(leaf)
        require(is_valid, "state", f"an array at {path}", leaf, _MAKE_A_STATE, error=TypeError)


_MAKE_A_STATE = (
    "Make a state with functrain.TrainState.create(params=..., tx=tx), of a Keras model with "
    "bridge.create_state(model, tx); of what fit returns, pass its state."
)


def require_training_step(step: Any) -> None:
    """Raises TypeError unless a step is a function of a state and a batch that trains.

    Steps that only evaluate, and fused steps, are rejected as well.
    """
    # Reading the signature of a function takes a tenth of a short fit.
    if not has_programs(step):
        check_step(step)
    if isinstance(step, MeteredStep) and not step.trains:
        raise TypeError(
            "step: expected a step that trains, got one from functrain.eval_step, which does not "
            "change the state. Make one with functrain.train_step(loss_fn, tx); to measure, call "
            "functrain.evaluate(state, step, data)."
        )
    if isinstance(step, Fused):
        raise TypeError(
            f"step: expected (state, batch) -> (state, logs), got {step!r}, which takes {step.k} "
            f"batches at once. Pass the step itself, and fuse={step.k}: loops fuse steps."
        )


def require_eval_step(step: Any) -> None:
    """Raises TypeError unless a step has metrics and does not train."""
    if not isinstance(step, MeteredStep) or step.trains:
        got = "a step that trains" if isinstance(step, MeteredStep) else _repr.brief(step)
        raise TypeError(
            f"eval_step: expected a step from functrain.eval_step(loss_fn, metrics=...), got {got}."
        )


def require_all_examples(batches: Batches) -> None:
    """Raises ValueError if a loader drops examples that should be measured or predicted."""
    advice = (
        "Make one with drop_remainder=False: the smaller last batch is weighted by its examples, "
        "and need not divide over the devices."
    )
    dropped = getattr(batches.data, "dropped", 0)
    expected = f"all of the data, not a loader that drops {dropped:,} examples"
    require(not dropped, batches.name, expected, batches.data, advice)


def require_batches(count: int, place: str = "", *, name: str = "data") -> None:
    """Raises ValueError if a pass over data had no batch; `place` names the pass."""
    if not count:
        raise ValueError(
            f"{name}: expected at least one batch{place}, got none. An iterator or generator is "
            "exhausted after one pass: pass an object that can be iterated again."
        )


def require_epochs_left(
    batches: Batches, position: Position, epochs: int, place: str, *, is_finished: bool = False
) -> None:
    """Raises ValueError if a run would end before the place where it begins.

    Args:
      batches: The data of the run.
      position: The position to begin at.
      epochs: The number of epochs of the training.
      place: A description of the position.
      is_finished: True if the training ended in that epoch: asking for it again returns its result.
    """
    if position.epoch < epochs:
        return
    unit, done, requested = "epochs", position.epoch, epochs
    minimum = "more than"
    if is_finished:
        done, minimum = position.epoch + 1, "at least"
    # With `fit(steps=)`, the caller counts steps.
    if isinstance(batches, EpochsOfSteps) and batches.total is not None:
        unit, done, requested = "steps", position.step, batches.total
    raise ValueError(
        f"{unit}: expected {minimum} the {done} that are over at {place}, got {requested}. Pass "
        f"the number of {unit} of the whole training, counted from its beginning."
    )
