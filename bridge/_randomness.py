"""The states of the global random number generators of Python and NumPy."""

import random
from typing import Any

import numpy as np


def random_state() -> dict[str, Any]:
    """Returns the states of NumPy's and Python's global generators, with which Keras shuffles."""
    version, words, next_gauss = random.getstate()
    # A checkpoint stores arrays, not tuples of 625 integers.
    python_state = [version, np.asarray(words, np.uint32), next_gauss]
    return {"numpy": np.random.get_state(legacy=False), "python": python_state}


def set_random_state(state: dict[str, Any]) -> None:
    """Restores the states that `random_state` returned."""
    np.random.set_state(state["numpy"])
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), next_gauss))
