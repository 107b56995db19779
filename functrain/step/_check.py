"""Checks of steps, losses, and the names of what they log."""

import collections
import itertools
from collections.abc import Iterable
from typing import Any

from functrain.common._arguments import accepts, describe_signature, parameters
from functrain.common._checks import require

_LOSS = "(params, model_state, batch, *, rng, training) -> (loss, Aux)"


def check_step(step: Any) -> None:
    """Raises TypeError unless this may be a function of a state and a batch; a loss is not."""
    advice = f"Make a step from a loss {_LOSS} with functrain.train_step or functrain.eval_step."
    expected = "(state, batch) -> (state, logs)"
    require_function("step", step, expected, advice, is_valid=accepts(step, 2))


def check_loss(loss_fn: Any) -> None:
    """Raises TypeError for a model, a step, or a loss of outputs and labels."""
    arguments = parameters(loss_fn)
    takes_any_keyword = any(p.kind is p.VAR_KEYWORD for p in arguments.values())
    # A function without a signature, such as one written in C, cannot be checked.
    is_valid = not arguments or takes_any_keyword or {"rng", "training"} <= arguments.keys()
    advice = "Make it with functrain.supervised(model, loss)."
    require_function("loss_fn", loss_fn, _LOSS, advice, is_valid=is_valid)


def require_function(name: str, x: Any, expected: str, advice: str, *, is_valid: bool) -> None:
    """Raises TypeError for an invalid function, or for a model, a class or no function at all."""
    # Every Keras model has `stateless_call`; functrain does not import Keras to check its class.
    is_function = callable(x) and not isinstance(x, type) and not hasattr(x, "stateless_call")
    if not (is_function and is_valid):
        raise TypeError(f"{name}: expected {expected}, got {describe_signature(x)}. {advice}")


def require_distinct_names(argument: str, *names: Iterable[str]) -> None:
    """Raises ValueError if a name occurs twice: one of its values would hide the other."""
    counts = collections.Counter(itertools.chain(*names))
    repeated = sorted(name for name, count in counts.items() if count > 1)
    expected = "a name of its own for the loss and each log and metric"
    require(not repeated, argument, expected, repeated, "Rename them.")
