"""Checks of states, steps and data that run, evaluate and predict share."""

from typing import Any

import jax

from functrain.common import _repr, _tree
from functrain.common._checks import require_no_problems, require_not_forked, require_untraced
from functrain.common._types import PyTree
from functrain.common._wide_integers import require_integers_fit
from functrain.data._batches import Batches
from functrain.data._epochs_of_steps import EpochsOfSteps
from functrain.engine._fuse import Fused
from functrain.engine._position import Position
from functrain.model._model import Model
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep


def require_state(state: PyTree) -> None:
    """Raises an error for objects that are often mistaken for a state.

    Raises:
      TypeError: The object is a model, a module, or the result of `fit`; or jax is tracing the
        function that calls the loop.
      ValueError: It has integers that jax would truncate to 32 bits.
    """
    # A forked child would hang in its first program instead of raising an error.
    require_not_forked()
    require_untraced("state", state)
    _require_pytree(state)
    require_integers_fit(state, "state")


def require_values(state: PyTree) -> None:
    """Raises ValueError for a state of shapes, which only a checkpoint can fill."""
    leaves = _tree.leaves_with_path(state)
    require_no_problems(
        "state",
        [path for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)],
        "arrays with values, since there is no checkpoint to resume from",
        "Pass the state itself instead of its shapes.",
    )


def _require_pytree(state: PyTree) -> None:
    # Recognized by their methods and fields: importing Keras, linen or the trainer here would load
    # what the caller may not need, or import upwards.
    got, advice = "", ""
    if hasattr(state, "stateless_call"):
        got = f"the Keras model {type(state).__name__}"
        advice = (
            "Pass bridge.create_state(model, tx), or train the model with bridge.fit(model, x, y)."
        )
    elif all(callable(getattr(state, name, None)) for name in ("init", "apply", "bind")):
        got = f"the module {type(state).__name__}"
        advice = (
            "With model = functrain.from_linen(module), make a state from model.init's result: "
            "functrain.TrainState.create(params=..., model_state=..., tx=tx)."
        )
    elif isinstance(state, Model):
        got = "a functrain.Model, which consists of functions"
        advice = (
            "Make a state from the result of model.init: "
            "functrain.TrainState.create(params=..., tx=tx)."
        )
    elif isinstance(state, tuple) and getattr(state, "_fields", ()) == ("state", "history"):
        got = "the result of fit"
        advice = "Pass its state: state, history = functrain.fit(...)."
    if got:
        raise TypeError(f"state: expected a pytree of arrays, got {got}. {advice}")


def require_training_step(step: Any) -> None:
    """Raises TypeError unless a step is a function of a state and a batch that trains.

    Steps that only evaluate, and fused steps, are rejected as well.
    """
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
    dropped = getattr(batches.data, "dropped", 0)
    if dropped:
        raise ValueError(
            f"{batches.name}: expected all of the data, got "
            f"{_repr.class_with_article(batches.data)} that drops the remainder, {dropped:,} "
            "examples. Make one with drop_remainder=False: the smaller last batch is weighted by "
            "its examples, and need not divide over the devices."
        )


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
