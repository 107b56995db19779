"""What run, evaluate and predict ask of a state, of a step and of the data."""

from typing import Any

from functrain.common import _repr
from functrain.common._checks import require_not_forked, require_untraced
from functrain.common._types import PyTree
from functrain.common._wide_integers import require_integers_fit
from functrain.data._batches import Batches
from functrain.engine._fuse import Fused
from functrain.model._model import Model
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep


def require_state(state: PyTree) -> None:
    """Refuses what is often taken for a state.

    Raises:
      TypeError: It is a model, a module, or what `fit` returned; or a loop was called while jax
        traces a function.
      ValueError: It holds integers that jax would cut to 32 bits.
    """
    require_not_forked()
    require_untraced("state", state)
    if hasattr(state, "stateless_call"):
        raise TypeError(
            f"state: expected a pytree of arrays, got the Keras model {type(state).__name__}. Take "
            "bridge.create_state(model, tx); or train it as it is, with bridge.fit(model, x, y)."
        )
    if all(callable(getattr(state, name, None)) for name in ("init", "apply", "bind")):
        raise TypeError(
            f"state: expected a pytree of arrays, got the module {type(state).__name__}. With "
            "model = functrain.from_linen(module), make one of what model.init returns: "
            "functrain.TrainState.create(params=..., model_state=..., tx=tx)."
        )
    if isinstance(state, Model):
        raise TypeError(
            "state: expected a pytree of arrays, got a functrain.Model, which is functions. Make "
            "one of what model.init returns: functrain.TrainState.create(params=..., tx=tx)."
        )
    if isinstance(state, tuple) and getattr(state, "_fields", ()) == ("state", "history"):
        raise TypeError(
            "state: expected a pytree of arrays, got what fit returned. Take its state: "
            "state, history = functrain.fit(...)."
        )
    require_integers_fit(state, "state")


def require_training_step(step: Any) -> None:
    """Refuses steps that a run would take in vain, or cannot take.

    Raises:
      TypeError: It is no function of a state and a batch, evaluates only, or is fused already.
    """
    check_step(step)
    if isinstance(step, MeteredStep) and not step.trains:
        raise TypeError(
            "step: expected one that trains, got one from functrain.eval_step, which leaves the "
            "state as it is. Make one with functrain.train_step(loss_fn, tx); measure with "
            "functrain.evaluate(state, step, data)."
        )
    if isinstance(step, Fused):
        raise TypeError(
            f"step: expected (state, batch) -> (state, logs), got {step!r}, which takes {step.k} "
            f"batches at once. Pass the step itself, and fuse={step.k}: loops fuse."
        )


def require_eval_step(step: Any) -> None:
    """Refuses a step without metrics, or one that trains.

    Raises:
      TypeError: As said.
    """
    if not isinstance(step, MeteredStep) or step.trains:
        got = "a step that trains" if isinstance(step, MeteredStep) else _repr.brief(step)
        raise TypeError(
            f"eval_step: expected one from functrain.eval_step(loss_fn, metrics=...), got {got}."
        )


def require_all_examples(batches: Batches) -> None:
    """Raises ValueError if a loader leaves out examples that are to be measured or predicted."""
    dropped = getattr(batches.data, "dropped", 0)
    if dropped:
        raise ValueError(
            f"{batches.name}: expected all of the data, got "
            f"{_repr.class_with_article(batches.data)} that drops the remainder, {dropped:,} "
            "examples. Make one with drop_remainder=False: a smaller "
            "last batch counts by its examples, and need not divide over the devices."
        )


def require_batches(taken: int, where: str = "", *, name: str = "data") -> None:
    """Refuses a pass that met no batch."""
    if not taken:
        raise ValueError(
            f"{name}: expected at least one batch{where}, got none. An iterator or generator is "
            "exhausted after one pass: pass something that can be iterated again."
        )
