"""What a step is asked before it is taken."""

import inspect
from typing import Any


def check_step(step: Any) -> None:
    """Refuses what is no function, and a loss where a step is wanted."""
    if not callable(step) or isinstance(step, type):
        raise TypeError(f"step: expected (state, batch) -> (state, logs), got {step!r}")
    if _is_loss(step):
        name = getattr(step, "__name__", type(step).__name__)
        raise TypeError(
            f"step: expected (state, batch) -> (state, logs), got the loss {name}. Make a step of "
            "it: functrain.train_step(loss_fn, tx), functrain.eval_step(loss_fn)."
        )


def _is_loss(step: Any) -> bool:
    """Whether a function cannot be called without `rng` and `training`, as a LossFn."""
    try:
        taken = inspect.signature(step).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False
    asked = {name for name, p in taken.items() if p.default is p.empty}
    return {"rng", "training"} <= asked
