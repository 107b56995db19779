"""What flax modules of both kinds are asked: their class, and their switch for training."""

import inspect
from typing import Any

# The names flax and its users give to one switch -> whether it is on in training.
SWITCHES = {"training": True, "train": True, "deterministic": False, "use_running_average": False}


def check_instance(module: Any, wanted: type, name: str, other: str, family: str) -> None:
    """Refuses a class, or a module of the other kind."""
    if isinstance(module, wanted):
        return
    got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
    raise TypeError(
        f"expected an instance of {name}, got {got}. Construct the module first, "
        f"as in Net(...); for one of {family} use {other}."
    )


def switches(module: Any, training: bool) -> dict[str, Any]:
    """Which of the known switches the module's call takes, and their values."""
    taken = inspect.signature(module.__call__).parameters
    return {name: training == on for name, on in SWITCHES.items() if name in taken}
