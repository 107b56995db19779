"""Guards: context managers that are entered while a step is traced.

They serve libraries whose objects a step could change by mistake. `bridge` adds one that raises if
a step assigns a Keras variable.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

_guards: list[Callable[[], AbstractContextManager[None]]] = []


def add_guard(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Registers a context that is entered whenever a step is traced.

    Args:
      context: Makes the context manager, which raises at its exit to reject the step.
    """
    _guards.append(context)


@contextlib.contextmanager
def tracing_guards() -> Iterator[None]:
    """Context manager: enters the guards."""
    with contextlib.ExitStack() as stack:
        for guard in _guards:
            stack.enter_context(guard())
        yield
