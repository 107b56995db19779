"""The generators that a process has but one of each."""

import random
from typing import Any

import numpy as np


def randomness() -> dict[str, Any]:
    """Returns the state of NumPy's and Python's own generators, by which Keras shuffles."""
    version, numbers, gauss = random.getstate()
    python = [version, np.asarray(numbers, np.uint32), gauss]
    return {"numpy": np.random.get_state(legacy=False), "python": python}


def put_randomness(found: dict[str, Any]) -> None:
    """Puts back what `randomness` returned."""
    np.random.set_state(found["numpy"])
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
