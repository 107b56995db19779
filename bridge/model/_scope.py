"""Running a Keras model as a pure function, and leaving it whole whatever happens."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import keras

from bridge import keras_private
from functrain.internal import tree as _tree


class Scope(keras.StatelessScope):  # type: ignore[misc]  # keras has no types
    """A StatelessScope that also notes the variables that were updated and are not in its mapping.

    Attributes:
      untracked: Those variables, by id.
    """

    def __init__(self, mapping: list[tuple[Any, Any]]) -> None:
        super().__init__(mapping, collect_losses=True, initialize_variables=False)
        self._known = frozenset(id(variable) for variable, _ in mapping)
        self.untracked: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Records an `assign`."""
        variable, _ = update
        if id(variable) not in self._known:
            self.untracked[id(variable)] = variable
        super().add_update(update)

    def require_all_tracked(self, problem: str, remedy: str) -> None:
        """Raises ValueError if variables were updated that are not in the mapping; it names them.

        Args:
          problem: What the message says before their names.
          remedy: What it says behind them.
        """
        if self.untracked:
            lines = [f"{v.path}: {_tree.spec(v)}" for v in self.untracked.values()]
            raise ValueError(f"{problem}:\n{_tree.bullets(lines)}\n{remedy}")


@contextlib.contextmanager
def name_scopes(names: Iterable[str]) -> Iterator[None]:
    """Puts names into the paths of the variables made inside."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(keras.name_scope(name))
        yield


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Leaves every trace and scope for a while: variables made inside have values at once."""
    with jax.ensure_compile_time_eval(), keras_private.variables.outside_scopes():
        yield


@contextlib.contextmanager
def initialize_new_variables() -> Iterator[None]:
    """Gives a value to every variable that was created inside, even when an exception ends it.

    A layer met for the first time inside a scope marks itself built and puts its values off; left
    so, it would draw new weights at each use, and Keras would refuse the next model that is built.
    """
    try:
        yield
    finally:
        # Leaving an outermost scope is the public way to have Keras make the values it put off.
        with outside_of_traces(), keras.StatelessScope():
            pass


@contextlib.contextmanager
def no_side_effects() -> Iterator[None]:
    """Refuses a step that changes Keras variables while it is traced.

    A model called as it is, ``model(x)``, assigns its statistics and seed counters; in a trace
    those would be tracers, which end the model. It may be entered again inside.

    Raises:
      ValueError: It names the variables; they are as they were.
    """
    with initialize_new_variables(), Scope([]) as scope:
        yield
    scope.require_all_tracked(
        "step: expected a pure function, got one that assigns Keras variables",
        "Apply the model through bridge.from_keras(model), whose variables are in the state. "
        "The model is unchanged.",
    )
