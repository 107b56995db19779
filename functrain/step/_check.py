"""What steps and losses are asked before they are taken."""

from typing import Any

from functrain.common import _repr, _tree
from functrain.common._arguments import parameters
from functrain.model._model import Model


def check_step(step: Any) -> None:
    """Refuses what is no function, and a loss where a step is wanted."""
    if not callable(step) or isinstance(step, type):
        raise TypeError(f"step: expected (state, batch) -> (state, logs), got {_tree.spec(step)}.")
    if {"rng", "training"} <= {n for n, p in parameters(step).items() if p.default is p.empty}:
        raise TypeError(
            f"step: expected (state, batch) -> (state, logs), got the loss {_repr.name(step)}. "
            "Make a step of it: functrain.train_step(loss_fn, tx), functrain.eval_step(loss_fn)."
        )
    if _takes_labels(step):
        raise TypeError(
            f"step: expected (state, batch) -> (state, logs), got {_repr.name(step)}, a loss of "
            f"outputs and labels. {_OF_A_MODEL}"
        )


def check_loss(loss_fn: Any) -> None:
    """Refuses what is no loss of params: a model, a step, a loss of outputs and labels."""
    expected = "loss_fn: expected (params, model_state, batch, *, rng, training) -> (loss, Aux)"
    if isinstance(loss_fn, Model) or hasattr(loss_fn, "stateless_call"):
        model = "model" if isinstance(loss_fn, Model) else "bridge.from_keras(model)"
        raise TypeError(
            f"{expected}, got a model. Make one with functrain.supervised({model}, loss)."
        )
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise TypeError(f"{expected}, got {_tree.spec(loss_fn)}.")
    taken = parameters(loss_fn)
    if not taken or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return
    if _takes_labels(loss_fn):
        raise TypeError(
            f"{expected}, got {_repr.name(loss_fn)}, a loss of outputs and labels. {_OF_A_MODEL}"
        )
    if missing := [name for name in ("rng", "training") if name not in taken]:
        raise TypeError(
            f"{expected}, got {_repr.name(loss_fn)}({', '.join(taken)}) without "
            f"{' and '.join(missing)}. Steps go into fit, run and evaluate as they are; a loss "
            "takes rng= and training=, used or not."
        )


_OF_A_MODEL = (
    "Make a loss of it first, functrain.supervised(model, loss), and of that a step, "
    "functrain.train_step(loss_fn, tx)."
)


def _takes_labels(function: Any) -> bool:
    """Whether a function is a loss as those of optax or Keras, told by what it calls labels."""
    return any(name in ("labels", "targets", "y_true") for name in list(parameters(function))[:2])
