"""Guards: context managers that are entered while a step is traced.

They serve libraries whose objects a step could change by mistake. `bridge` adds one that raises if
a step assigns a Keras variable.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple


class Guard(NamedTuple):
    """A context manager, and a predicate that chooses the steps it is entered for."""

    applies_to: Callable[[Any], bool]
    context: Callable[[], AbstractContextManager[None]]


_guards: list[Guard] = []


def add_guard(
    applies_to: Callable[[Any], bool], context: Callable[[], AbstractContextManager[None]]
) -> None:
    """Registers a context that is entered whenever a step is traced that it applies to.

    Args:
      applies_to: Returns True for the steps in question. Other programs are not touched: importing
        `bridge` must not change programs of pure JAX.
      context: Makes the context manager, which raises at its exit to reject the step.
    """
    _guards.append(Guard(applies_to, context))


@contextlib.contextmanager
def tracing_guards(step: Any) -> Iterator[None]:
    """Context manager: enters the guards that apply to a step."""
    with contextlib.ExitStack() as stack:
        for guard in _guards:
            if guard.applies_to(step):
                stack.enter_context(guard.context())
        yield
