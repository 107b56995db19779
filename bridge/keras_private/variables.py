"""A variable's value and place, and the scopes in which none can be made."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator


def swap_value(variable: Any, value: Any) -> Any:
    """Gives a variable another value, traced or not or None, and returns the one it had.

    Sets `Variable._value`; checked with Keras 3.15.1. Without it a metric updated inside `call`
    starts from what it was before the step was traced.
    """
    before = variable._value
    variable._value = value
    return before


@contextlib.contextmanager
def other_values(pairs: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Gives variables other values for a while, by `swap_value`."""
    before = [(variable, swap_value(variable, value)) for variable, value in pairs]
    try:
        yield
    finally:
        for variable, value in before:
            swap_value(variable, value)


def layout(variable: Any) -> Any:
    """Returns where `keras.distribution` puts a variable, or None.

    Reads `Variable._layout`; checked with Keras 3.15.1. Without it the slots of a sharded
    variable would be replicated.
    """
    return getattr(variable, "_layout", None)


def global_seed() -> np.ndarray | None:
    """Returns the state of the generator that draws where no seed is given; None if there is none.

    Reads the global attribute GLOBAL_SEED_GENERATOR; checked with Keras 3.15.1. Without it what
    callbacks draw by keras.random is something else after a resume.
    """
    found = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if found is None else np.asarray(found.state.value)


def put_global_seed(state: np.ndarray | None) -> None:
    """Puts back what `global_seed` returned.

    Calls `global_seed_generator`, which makes one of Python's randomness where there is none;
    checked with Keras 3.15.1.
    """
    if state is not None:
        global_seed_generator().state.assign(state)


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """Leaves every StatelessScope for a while: inside one no variable gets a value.

    Sets the global attribute "stateless_scope"; checked with Keras 3.15.1. Without it a step that
    uses an optimizer for the first time could not be traced under a guard against side effects,
    and a layer first built under that guard would never get its weights.
    """
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)
