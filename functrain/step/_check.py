"""Checks of steps and losses, and of the names of what they log."""

from collections.abc import Iterable
from typing import Any

from functrain.common import _repr, _tree
from functrain.common._arguments import parameters
from functrain.common._checks import require
from functrain.model._model import Model


def check_step(step: Any) -> None:
    """Raises TypeError unless this may be a function of a state and a batch; a loss is not."""
    expected = "step: expected (state, batch) -> (state, logs)"
    _require_function(step, expected)
    if {"rng", "training"} <= {n for n, p in parameters(step).items() if p.default is p.empty}:
        raise TypeError(
            f"{expected}, got the loss {_repr.name(step)}. Make a step of it: "
            "functrain.train_step(loss_fn, tx), functrain.eval_step(loss_fn)."
        )


def check_loss(loss_fn: Any) -> None:
    """Raises TypeError for a model, a step, or a loss of outputs and labels."""
    expected = "loss_fn: expected (params, model_state, batch, *, rng, training) -> (loss, Aux)"
    refuse_model(loss_fn, expected, "supervised({}, loss)")
    _require_function(loss_fn, expected)
    taken = parameters(loss_fn)
    if not taken or any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return
    if missing := [name for name in ("rng", "training") if name not in taken]:
        raise TypeError(
            f"{expected}, got {_repr.name(loss_fn)}({', '.join(taken)}) without "
            f"{' and '.join(missing)}. A step needs no loss around it; a loss takes both, used or "
            "not."
        )


def refuse_model(x: Any, expected: str, make: str) -> None:
    """Raises TypeError for a model, functrain's or Keras's; `make` says what to make of it."""
    if isinstance(x, Model) or hasattr(x, "stateless_call"):
        model = "model" if isinstance(x, Model) else "bridge.from_keras(model)"
        raise TypeError(f"{expected}, got a model. Make one with functrain.{make.format(model)}.")


def refuse_names(argument: str, names: Iterable[str], taken: Iterable[str], owner: str) -> None:
    """Raises ValueError where names are taken by something else, which would hide one of them."""
    both = sorted(set(names).intersection(taken))
    expected = f"names other than those of {owner}"
    require(not both, argument, expected, both, "Rename them.")


def _require_function(x: Any, expected: str) -> None:
    if not callable(x) or isinstance(x, type):
        raise TypeError(f"{expected}, got {_tree.spec(x)}.")
    # Losses of optax and Keras are told by their names for labels.
    if {"labels", "targets", "y_true"}.intersection(list(parameters(x))[:2]):
        raise TypeError(
            f"{expected}, got {_repr.name(x)}, a loss of outputs and labels. Make a loss of it "
            "with functrain.supervised(model, loss), and a step of that with "
            "functrain.train_step(loss_fn, tx)."
        )
