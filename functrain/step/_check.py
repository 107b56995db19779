"""What a step is asked before it is taken."""

from typing import Any

from functrain.common._arguments import parameters


def check_step(step: Any) -> None:
    """Refuses what is no function, and a loss where a step is wanted."""
    if not callable(step) or isinstance(step, type):
        raise TypeError(f"step: expected (state, batch) -> (state, logs), got {step!r}")
    asked = {name for name, p in parameters(step).items() if p.default is p.empty}
    if {"rng", "training"} <= asked:
        name = getattr(step, "__name__", type(step).__name__)
        raise TypeError(
            f"step: expected (state, batch) -> (state, logs), got the loss {name}. Make a step of "
            "it: functrain.train_step(loss_fn, tx), functrain.eval_step(loss_fn)."
        )
