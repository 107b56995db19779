"""A variable's value and layout, the global seed, and the scopes without values."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator


def swap_value(variable: Any, value: Any) -> Any:
    """Gives a variable another value (a tracer, an array or None), and returns the old one.

    Sets `Variable._value`; checked with Keras 3.15.1. Without it a metric updated inside `call`
    starts from its value before the step was traced.
    """
    old_value = variable._value
    variable._value = value
    return old_value


@contextlib.contextmanager
def temporary_values(pairs: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Context manager: gives variables other values until it exits."""
    old_pairs: list[tuple[Any, Any]] = []
    try:
        for variable, value in pairs:
            # Noted before it is replaced: Ctrl-C may come at any time.
            old_pairs.append((variable, variable._value))
            swap_value(variable, value)
        yield
    finally:
        # A variable may be among them twice.
        for variable, value in reversed(old_pairs):
            swap_value(variable, value)


def layout(variable: Any) -> Any:
    """Returns the layout that `keras.distribution` gave a variable, or None.

    Reads `Variable._layout`; checked with Keras 3.15.1. Without it the slots of a sharded
    variable would be replicated.
    """
    return getattr(variable, "_layout", None)


def global_seed() -> np.ndarray | None:
    """Returns the state of Keras's global generator; None if it has not been made yet.

    Reads the global attribute GLOBAL_SEED_GENERATOR; checked with Keras 3.15.1. Without it
    callbacks that call keras.random without a seed draw other numbers after a resume.
    """
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else np.asarray(generator.state.value)


def set_global_seed(state: np.ndarray | None) -> None:
    """Restores the state that `global_seed` returned.

    Calls `global_seed_generator`, which makes a generator if the process has not made one, seeded
    from Python's random module; checked with Keras 3.15.1.
    """
    if state is not None:
        global_seed_generator().state.assign(state)


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """Context manager: leaves every StatelessScope, since no variable gets a value inside one.

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
