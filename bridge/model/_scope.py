"""Running a Keras model as a pure function, and leaving it whole whatever happens."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import keras

from functrain.internal import tree as _tree


class Scope(keras.StatelessScope):  # type: ignore[misc]  # keras has no types
    """A StatelessScope which also keeps the variables that were updated and are in no list.

    Attributes:
      strays: Those variables, by id.
    """

    def __init__(self, mapping: list[tuple[Any, Any]]) -> None:
        super().__init__(mapping, collect_losses=True, initialize_variables=False)
        self._known = frozenset(id(variable) for variable, _ in mapping)
        self.strays: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Records an `assign`."""
        variable, _ = update
        if id(variable) not in self._known:
            self.strays[id(variable)] = variable
        super().add_update(update)

    def require_no_strays(self) -> None:
        """Refuses an application that updated what the state does not hold.

        Raises:
          ValueError: It names the variables.
        """
        if not self.strays:
            return
        lines = [f"{v.path}: {_tree.spec(v)}" for v in self.strays.values()]
        raise ValueError(
            "the model updated variables that are in neither model.variables nor a layer's "
            f"metrics, so their new values would be lost:\n{_tree.bullets(lines)}\n"
            "An RNN with stateful=True is one cause: use stateful=False, and pass the states "
            "(return_state=True, initial_state=...). keras.random without seed= is another: give "
            "it a keras.random.SeedGenerator held as an attribute. A variable of your own must be "
            "an attribute of its layer, best made by self.add_weight."
        )


@contextlib.contextmanager
def keep_whole() -> Iterator[None]:
    """Gives a value to every variable that was created inside, even when an exception ends it.

    A layer met for the first time inside a scope marks itself built and defers its values; left
    so, it would draw new weights at each use. The values are made outside any trace.
    """
    try:
        yield
    finally:
        # Leaving an outermost scope is the public way to have Keras make deferred values.
        with jax.ensure_compile_time_eval(), keras.StatelessScope():
            pass


@contextlib.contextmanager
def no_side_effects() -> Iterator[None]:
    """Refuses a step that changes Keras variables while it is traced.

    A model called as it is, ``model(x)``, assigns its statistics and seed counters; in a trace
    those would be tracers, which end the model.

    Raises:
      ValueError: It names the variables; they are as they were.
    """
    with Scope([]) as scope:
        yield
    if scope.strays:
        lines = [f"{v.path}: {_tree.spec(v)}" for v in scope.strays.values()]
        raise ValueError(
            "step: expected a pure function, got one that assigns Keras variables:\n"
            f"{_tree.bullets(lines)}\n"
            "Apply the model through bridge.from_keras(model), whose variables are in the state. "
            "The model is unchanged."
        )
