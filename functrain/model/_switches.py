"""The arguments by which flax modules of both kinds are told that they train."""

import inspect
from typing import Any

# The names flax and its users give to one switch -> whether it is on in training.
SWITCHES = {"training": True, "train": True, "deterministic": False, "use_running_average": False}


def switches(module: Any, training: bool) -> dict[str, Any]:
    """Which of the known switches the module's call takes, and their values."""
    taken = inspect.signature(module.__call__).parameters
    return {name: training == on for name, on in SWITCHES.items() if name in taken}
