"""What watches over the tracing of a step, for libraries whose objects a step could change."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

_guards: list[Callable[[], AbstractContextManager[None]]] = []


def add_guard(guard: Callable[[], AbstractContextManager[None]]) -> None:
    """Enters ``guard()`` whenever a step is traced; it raises at the exit to refuse the step."""
    _guards.append(guard)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Enters all guards."""
    with contextlib.ExitStack() as stack:
        for guard in _guards:
            stack.enter_context(guard())
        yield
