"""Running a Keras model as a pure function, without damage to its variables."""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import keras

from bridge import keras_private
from functrain.internal import tree as _tree
from functrain.internal import warn

# The variables that were read in scopes without a value for them, by id, under a guard.
_constants: ContextVar[dict[int, Any] | None] = ContextVar("constants", default=None)


class Scope(keras.StatelessScope):  # type: ignore[misc]  # keras has no types
    """A StatelessScope that also records updates of variables which are not in its mapping.

    Attributes:
      untracked: The updated variables that are not in the mapping, by id.
    """

    def __init__(self, mapping: list[tuple[Any, Any]]) -> None:
        super().__init__(mapping, collect_losses=True, initialize_variables=False)
        self._mapped_ids = frozenset(id(variable) for variable, _ in mapping)
        self.untracked: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Records an update, which Keras passes for each `assign` inside the scope."""
        variable, _ = update
        if id(variable) not in self._mapped_ids:
            self.untracked[id(variable)] = variable
        super().add_update(update)

    def get_current_value(self, variable: Any) -> Any:
        """Returns the value that a variable has inside the scope; None if that is its own."""
        value = super().get_current_value(variable)
        constants = _constants.get()
        (own_value,) = keras_private.variables.read([variable])
        # A variable without a value was created in the trace, or raises. A metric that is
        # updated in a layer's `call` has a traced one.
        has_value = own_value is not None and not isinstance(own_value, jax.core.Tracer)
        if value is None and constants is not None and has_value:
            constants[id(variable)] = variable
        return value

    def require_all_tracked(self, problem: str, remedy: str) -> None:
        """Raises ValueError if variables were updated that are not in the mapping.

        Args:
          problem: The text before the names of the variables.
          remedy: The text after them.
        """
        if self.untracked:
            lines = [f"{v.path}: {_tree.spec(v)}" for v in self.untracked.values()]
            raise ValueError(f"{problem}:\n{_tree.bullets(lines)}\n{remedy}")


@contextlib.contextmanager
def name_scopes(names: Iterable[str]) -> Iterator[None]:
    """Context manager: adds names to the paths of the variables created inside."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(keras.name_scope(name))
        yield


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Context manager: leaves all traces and scopes, so that new variables get values at once."""
    with jax.ensure_compile_time_eval(), keras_private.variables.outside_scopes():
        yield


@contextlib.contextmanager
def initialize_new_variables() -> Iterator[None]:
    """Context manager: gives values to all variables created inside, even after an exception."""
    # A layer that is first called inside a scope counts as built, but its values are deferred.
    # Without values it would draw new weights at each use, and Keras would refuse to build the
    # next model.
    try:
        yield
    finally:
        # Leaving an outermost scope is the public way to make Keras compute deferred values.
        with outside_of_traces(), keras.StatelessScope():
            pass


@contextlib.contextmanager
def no_side_effects() -> Iterator[None]:
    """Context manager: raises an error if a step assigns Keras variables while it is traced.

    Warns if the step reads variables that are not in its state. It may be nested.

    Raises:
      ValueError: The step assigned variables. The message names them; their values are unchanged.
    """
    # A direct call ``model(x)`` assigns statistics and seed counters. In a trace their values would
    # be tracers, after which the model could not be used any more.
    constants: dict[int, Any] = {}
    outer = _constants.set(constants)
    try:
        with initialize_new_variables(), Scope([]) as scope:
            yield
    finally:
        _constants.reset(outer)
    scope.require_all_tracked(
        "step: expected a pure function, got one that assigns Keras variables",
        "Apply the model through bridge.from_keras(model), whose variables are in the state. "
        "The model is unchanged.",
    )
    if constants:
        lines = [f"{v.path}: {_tree.spec(v)}" for v in constants.values()]
        warn(
            "step: expected it to read variables of its state only. The values of these are "
            f"compiled in as constants:\n{_tree.bullets(lines)}\nIf they change, make them "
            "attributes of the model or of a layer, or pass their values in the batch."
        )
