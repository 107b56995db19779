"""What watches over the tracing of a step, for libraries whose objects a step could change."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple


class Guard(NamedTuple):
    """A context manager for the tracing of some steps."""

    concerns: Callable[[Any], bool]
    context: Callable[[], AbstractContextManager[None]]


_guards: list[Guard] = []


def add_guard(
    concerns: Callable[[Any], bool], context: Callable[[], AbstractContextManager[None]]
) -> None:
    """Enters a context whenever a step is traced that it concerns.

    Args:
      concerns: Returns True for the steps in question; no other program is touched.
      context: Makes the context manager, which raises at its exit to refuse the step.
    """
    _guards.append(Guard(concerns, context))


@contextlib.contextmanager
def tracing_guards(step: Any) -> Iterator[None]:
    """Context manager: enters the guards that a step concerns."""
    with contextlib.ExitStack() as stack:
        for guard in _guards:
            if guard.concerns(step):
                stack.enter_context(guard.context())
        yield
