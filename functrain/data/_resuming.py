"""Where an iterator is, if it says so itself: grain's do, and torchdata's loaders."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_NAMES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class _Methods(NamedTuple):
    get: Callable[[], Any]
    put: Callable[[Any], None]


class Place:
    """Where a pass over data is, to be saved and sought again.

    Data are asked between batches only: one that was fetched to look at, and not handed out yet,
    would be lost. So there is a mark, and the number of batches taken before it.

    Args:
      data: An iterable; one with `state_dict` and `load_state_dict` is asked itself, else its
        iterator is, if it has these or `get_state` and `set_state`.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._methods: _Methods | None = None
        self._marked: dict[str, Any] | None = None
        self.taken = 0

    def begin(self, saved: dict[str, Any] | None) -> tuple[Iterator[Any], int]:
        """Begins a pass; returns its iterator, and the number of its first batch."""
        methods = _methods(self._data)
        if saved is not None and methods is not None:
            methods.put(saved["state"])
        iterator = iter(self._data)
        if methods is None:
            methods = _methods(iterator)
            if saved is not None and methods is not None:
                methods.put(saved["state"])
        self._methods = methods
        return iterator, 0 if saved is None or methods is None else saved["batch"]

    def mark(self) -> None:
        """Asks where it is: all batches fetched have been handed out."""
        if self._methods is not None:
            self._marked = {"state": self._methods.get(), "batch": self.taken}

    def marked(self) -> dict[str, Any] | None:
        """Returns the last mark; None where nobody knows."""
        return self._marked

    def at_the_end(self) -> dict[str, Any] | None:
        """Returns what to begin the next pass with; None where it begins as the first did."""
        methods = _methods(self._data)
        return None if methods is None else {"state": methods.get(), "batch": 0}


def _methods(owner: Any) -> _Methods | None:
    for get, put in _NAMES:
        found = getattr(owner, get, None), getattr(owner, put, None)
        if all(map(callable, found)):
            return _Methods(*found)  # type: ignore[arg-type]
    return None
