"""The arguments that tell flax modules, linen and nnx, whether they train."""

import inspect
from typing import Any

# Flax and its users have several names for the same argument. Each name maps to its value in
# training; its value otherwise is the opposite.
SWITCHES = {"training": True, "train": True, "deterministic": False, "use_running_average": False}


def switches(module: Any, training: bool) -> dict[str, Any]:
    """Returns the values of the switches that the module's ``__call__`` takes, by name."""
    parameters = inspect.signature(module.__call__).parameters
    return {name: training == value for name, value in SWITCHES.items() if name in parameters}
