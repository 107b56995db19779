"""The words of the library as types."""

from typing import Any, Protocol, TypeAlias, TypeVar

PyTree: TypeAlias = Any
"""Any nesting of containers that `jax.tree` knows, with arrays as leaves."""

StateT = TypeVar("StateT")


class Step(Protocol[StateT]):
    """A pure function ``(state, batch) -> (state, logs)`` over any pytree state.

    The returned state has the structure, shapes, dtypes and weak types of the one it was given:
    that is what lets a program scan over it.
    """

    def __call__(self, state: StateT, batch: PyTree, /) -> tuple[StateT, PyTree]:
        """Takes one step."""
        ...


class StepTraits:
    """What loops ask of a step besides calling it, answered for a plain function.

    A step that carries metrics or trains a population is an object of a subclass that overrides
    some of these. Loops ask through `traits_of`, which also takes plain functions.

    Attributes:
      is_population: True if states are of many members, and logs and metrics have one value a
        member.
      stays_compiled: True if parts that are compiled by themselves stay so where the step is taken
        uncompiled, as in Keras; else ``jax.disable_jit`` takes them apart.
    """

    is_population: bool = False
    stays_compiled: bool = False

    def wrap_state(self, state: PyTree) -> PyTree:
        """Returns what the step takes for a bare state: here the state itself."""
        return state

    def require_data(self, data: Any, name: str) -> None:
        """Raises ValueError if the step cannot take batches of these data; `name` is for errors."""


_OF_A_FUNCTION = StepTraits()


def traits_of(step: Any) -> StepTraits:
    """Returns the traits of a step, which is not wrapped: its identity is a key of caches."""
    return step if isinstance(step, StepTraits) else _OF_A_FUNCTION
