"""The types of steps and pytrees."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import jax

PyTree: TypeAlias = Any
"""Any nesting of containers that `jax.tree` knows, with arrays as leaves."""

StateT = TypeVar("StateT")


class Step(Protocol[StateT]):
    """A pure function ``(state, batch) -> (state, logs)`` over any pytree state.

    The returned state must have the structure, shapes, dtypes and weak types of the given state, so
    that a program can scan over steps.
    """

    def __call__(self, state: StateT, batch: PyTree, /) -> tuple[StateT, PyTree]:
        """Takes one step."""
        ...


class StepTraits:
    """The properties of a step that loops need besides calling it; here those of a function.

    A step that carries metrics or trains a population is an object of a subclass that overrides
    some of these. Loops read them through `traits_of`, which also accepts plain functions.

    Attributes:
      is_population: True if a state holds many members, and logs and metrics have one value per
        member.
      example_axis: The axis of a batch's leaves that its examples lie along.
      stays_compiled: True if nested jitted functions stay compiled when the step runs uncompiled,
        as in Keras. Otherwise ``jax.disable_jit`` runs them op by op.
    """

    is_population: bool = False
    example_axis: int = 0
    stays_compiled: bool = False

    def wrap_state(self, state: PyTree) -> PyTree:
        """Returns the state in the form that the step takes: here unchanged."""
        # A MeteredStep adds the metrics' initial values to it.
        return state

    def run_chunk(
        self,
        run: Callable[..., Any],
        carry: PyTree,
        chunk: PyTree,
        n: jax.Array,
        on_chip_bytes: int,
    ) -> tuple[PyTree, PyTree]:
        """Returns ``run(carry, chunk)``, which trains; a subclass may run a part at a time.

        Args:
          run: Takes the steps of a chunk: ``(carry, chunk) -> (carry, rows)``.
          carry: What the step carries.
          chunk: The batches, stacked.
          n: i32[], the number of steps that it takes.
          on_chip_bytes: `Chip.on_chip_bytes` of the device.
        """
        carry, rows = run(carry, chunk)
        return carry, rows

    def require_data(self, data: Any, name: str) -> None:
        """Raises ValueError if the step cannot take batches of this data.

        Args:
          data: The data that the loop is given.
          name: The name of the loop's argument, for the error.
        """


_FUNCTION_TRAITS = StepTraits()


def traits_of(step: Any) -> StepTraits:
    """Returns the traits of a step."""
    # A function is not wrapped in an object with traits: caches of programs use its identity.
    return step if isinstance(step, StepTraits) else _FUNCTION_TRAITS
