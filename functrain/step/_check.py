"""Checks of steps, losses, and the names of what they log."""

from collections.abc import Iterable
from typing import Any

from functrain.common import _tree
from functrain.common._arguments import accepts, describe_signature, parameters
from functrain.common._checks import require
from functrain.model._model import Model


def check_step(step: Any) -> None:
    """Raises TypeError unless this may be a function of a state and a batch; a loss is not."""
    expected = "step: expected (state, batch) -> (state, logs)"
    _require_function(step, expected)
    if not accepts(step, 2):
        raise TypeError(
            f"{expected}, got {describe_signature(step)}. Make a step from a loss "
            "(params, model_state, batch, *, rng, training): functrain.train_step(loss_fn, tx), "
            "functrain.eval_step(loss_fn)."
        )


def check_loss(loss_fn: Any) -> None:
    """Raises TypeError for a model, a step, or a loss of outputs and labels."""
    expected = "loss_fn: expected (params, model_state, batch, *, rng, training) -> (loss, Aux)"
    require_no_model(loss_fn, expected, "supervised({}, loss)")
    _require_function(loss_fn, expected)
    arguments = parameters(loss_fn)
    # A function without a signature, such as one written in C, cannot be checked, and `**kwargs`
    # accepts both names.
    if not arguments or any(p.kind is p.VAR_KEYWORD for p in arguments.values()):
        return
    missing = [name for name in ("rng", "training") if name not in arguments]
    if missing:
        raise TypeError(
            f"{expected}, got {describe_signature(loss_fn)} without "
            f"{' and '.join(missing)}. A loss must accept both arguments, even if it ignores them. "
            "Make one from a loss of outputs and labels with functrain.supervised(model, loss). "
            "For a step from train_step, pass the loss that it was made from; a step of your own "
            "goes into fit as it is."
        )


def require_no_model(x: Any, expected: str, call: str) -> None:
    """Raises TypeError for a functrain or Keras model.

    Args:
      x: The argument to check.
      expected: The beginning of the message.
      call: The functrain call that makes what is expected, with {} for the model.
    """
    # Every Keras model has `stateless_call`; functrain does not import Keras to check its class.
    if isinstance(x, Model) or hasattr(x, "stateless_call"):
        model = "model" if isinstance(x, Model) else "bridge.from_keras(model)"
        raise TypeError(f"{expected}, got a model. Make one with functrain.{call.format(model)}.")


def require_distinct_names(
    argument: str, names: Iterable[str], reserved: Iterable[str], owner: str
) -> None:
    """Raises ValueError if a name is reserved: one of the two values would hide the other."""
    clashes = sorted(set(names).intersection(reserved))
    expected = f"names other than those of {owner}"
    require(not clashes, argument, expected, clashes, "Rename them.")


def _require_function(x: Any, expected: str) -> None:
    if not callable(x) or isinstance(x, type):
        raise TypeError(f"{expected}, got {_tree.spec(x)}.")
