"""The values of running metrics, computed in one program."""

from typing import Any

import jax

from functrain.common._types import PyTree
from functrain.engine._programs import cached


def computed(step: Any, metrics: PyTree) -> Any:
    """Returns what the metrics of a step come to, as arrays on the device."""
    program = cached(step, "compute", lambda get: jax.jit(lambda m: get().values(m)))
    return program(metrics)
