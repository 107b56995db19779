"""Where the time of a run goes: what each part takes is added up for those who ask."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

import jax

T = TypeVar("T")
# By kind, for each that asks.
Seconds: TypeAlias = collections.defaultdict[str, float]
_asking: list[Seconds] = []
# For each part that is running, the seconds of the parts within it, which have kinds of their own.
_within: list[float] = []
_compilations = 0
_clock = time.perf_counter


def ask(seconds: Seconds) -> None:
    """Begins to add up the seconds of each kind in a dict, until `end` is called with it."""
    if not _asking:
        jax.monitoring.register_event_duration_secs_listener(_count)
    _asking.append(seconds)


def end(seconds: Seconds) -> None:
    """Stops adding up seconds in a dict that was passed to `ask`."""
    _asking[:] = [x for x in _asking if x is not seconds]
    if not _asking:
        jax.monitoring.unregister_event_duration_listener(_count)


def _count(event: str, duration_secs: float, **details: str | int) -> None:
    global _compilations
    _compilations += event.endswith("backend_compile_duration")


@contextlib.contextmanager
def spent(kind: str, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Context manager: adds its seconds to a kind, unless a condition holds at its end."""
    if not _asking:
        yield
        return
    start = _clock()
    _within.append(0.0)
    try:
        yield
    finally:
        own = _clock() - start - _within.pop()
        if not unless():
            for seconds in _asking:
                seconds[kind] += own
            if _within:
                _within[-1] += own


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Context manager of the call of a program: its seconds count if it was compiled for it."""
    before = _compilations
    with spent("compiling", unless=lambda: _compilations == before):
        yield


def timed(kind: str, items: Iterator[T], unless: Callable[[], bool]) -> Iterator[T]:
    """Yields items; making each is a part of a kind, unless a condition holds when it is made."""
    while True:
        with spent(kind, unless):
            item = next(items, None)
        if item is None:
            return
        yield item
