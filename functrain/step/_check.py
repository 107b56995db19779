"""What steps and losses are asked before they are taken."""

from typing import Any

from functrain.common import _repr, _tree
from functrain.common._arguments import parameters
from functrain.model._model import Model


def check_step(step: Any) -> None:
    """Refuses what is no function, and a loss where a step is wanted."""
    expected = "step: expected (state, batch) -> (state, logs)"
    _require_function(step, expected)
    if {"rng", "training"} <= {n for n, p in parameters(step).items() if p.default is p.empty}:
        raise TypeError(
            f"{expected}, got the loss {_repr.name(step)}. Make a step of it: "
            "functrain.train_step(loss_fn, tx), functrain.eval_step(loss_fn)."
        )
    _refuse_labels(step, expected)


def check_loss(loss_fn: Any) -> None:
    """Refuses what is no loss of params: a model, a step, a loss of outputs and labels."""
    expected = "loss_fn: expected (params, model_state, batch, *, rng, training) -> (loss, Aux)"
    refuse_model(loss_fn, expected, "supervised({}, loss)")
    _require_function(loss_fn, expected)
    taken = parameters(loss_fn)
    if not taken or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return
    _refuse_labels(loss_fn, expected)
    if missing := [name for name in ("rng", "training") if name not in taken]:
        raise TypeError(
            f"{expected}, got {_repr.name(loss_fn)}({', '.join(taken)}) without "
            f"{' and '.join(missing)}. Steps go into fit, run and evaluate as they are; a loss "
            "takes rng= and training=, used or not."
        )


def refuse_model(x: Any, expected: str, make: str) -> None:
    """Refuses a model, functrain's or Keras's, and says how to make of it what is expected."""
    if isinstance(x, Model) or hasattr(x, "stateless_call"):
        model = "model" if isinstance(x, Model) else "bridge.from_keras(model)"
        raise TypeError(f"{expected}, got a model. Make one with functrain.{make.format(model)}.")


def _require_function(x: Any, expected: str) -> None:
    if not callable(x) or isinstance(x, type):
        raise TypeError(f"{expected}, got {_tree.spec(x)}.")


def _refuse_labels(function: Any, expected: str) -> None:
    """Refuses a loss as those of optax or Keras, told by what it calls labels."""
    if {"labels", "targets", "y_true"}.intersection(list(parameters(function))[:2]):
        raise TypeError(
            f"{expected}, got {_repr.name(function)}, a loss of outputs and labels. Make a loss "
            "of it first, functrain.supervised(model, loss), and of that a step, "
            "functrain.train_step(loss_fn, tx)."
        )
