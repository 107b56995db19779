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
