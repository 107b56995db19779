"""A variable's value and layout, the global seed, and the scopes without values."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator


def read(variables: Sequence[Any]) -> list[Any]:
    """Returns the arrays of variables, None for one that has none.

    Reads `Variable._value`; checked with Keras 3.15.1. `Variable.value` takes ten times as long,
    and raises for a variable without a value.
    """
    return [variable._value for variable in variables]


def write(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Gives variables other arrays, or None, without a copy or a check.

    Sets `Variable._value`; checked with Keras 3.15.1. `Variable.assign` takes a hundred times as
    long, and cannot take a value out of a variable.
    """
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


@contextlib.contextmanager
def temporary_values(pairs: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """Context manager: gives variables other values (tracers, arrays or None) until it exits."""
    old_pairs: list[tuple[Any, Any]] = []
    try:
        for variable, value in pairs:
            # Noted before it is replaced: Ctrl-C may come at any time.
            old_pairs.append((variable, variable._value))
            variable._value = value
        yield
    finally:
        # A variable may be among them twice.
        for variable, value in reversed(old_pairs):
            variable._value = value


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
