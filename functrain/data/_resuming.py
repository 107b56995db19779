"""Where a pass over data is, to be saved and sought again."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from functrain.common._types import PyTree
from functrain.data._glimpse import Glimpse, glimpse

# grain's iterators have the first pair, torchdata's loaders the second.
_NAMES = (("get_state", "set_state"), ("state_dict", "load_state_dict"))

Mark = dict[str, Any]
"""`state`: what the data said of the place, None if they say nothing; `batch`: how many batches
had been taken; `ended`: whether the pass had no more."""


class _Methods(NamedTuple):
    get: Callable[[], Any]
    put: Callable[[Any], None]


class Place:
    """Where a pass over data is.

    Data are asked between batches only: one that was fetched to look at, and not handed out yet,
    would be lost. So there is a mark, and the number of batches taken before it.

    Args:
      data: An iterable; one with `state_dict` and `load_state_dict` is asked itself, else its
        iterator is, if it has these or `get_state` and `set_state`.

    Attributes:
      taken: Batches of the pass that have been handed out.
      ended: Whether the pass has no more.
      marked: The last mark.
      seen: A glimpse of the first batch that was fetched in the pass.
      first: How the run began: the `state` before its first batch, and a glimpse of that `batch`.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._own = _methods(data)
        self._methods: _Methods | None = None
        self.marked: Mark | None = None
        self.taken = 0
        self.ended = False
        self.seen: Glimpse | None = None
        self.first: dict[str, Any] | None = None

    def begin(self, mark: Mark | None = None) -> tuple[Iterator[Any], int]:
        """Begins a pass, at a mark; returns its iterator, and the number of its first batch."""
        state, self.seen = None if mark is None else mark["state"], None
        self.taken, self.ended = (0, False) if mark is None else (mark["batch"], mark["ended"])
        if self._own is not None and state is not None:
            self._own.put(state)
        iterator = iter(()) if self.ended else iter(self._data)
        self._methods = self._own or _methods(iterator)
        if self._methods is not None and self._own is None and state is not None:
            self._methods.put(state)
        self.mark()
        return iterator, self.taken

    def saw(self, batch: PyTree) -> None:
        """Notes the first batch that a pass has fetched."""
        self.seen = glimpse(batch)
        if self.first is None and self.marked is not None:
            self.first = {"state": self.marked["state"], "batch": self.seen}

    def mark(self) -> None:
        """Asks where it is: all batches fetched have been handed out."""
        state = None if self._methods is None else copy.deepcopy(self._methods.get())
        # What cannot be sought is counted from its beginning, unless there is nothing to seek.
        known = self.ended or self._methods is not None
        self.marked = {"state": state, "batch": self.taken if known else 0, "ended": self.ended}

    def at_the_end(self) -> Mark:
        """Returns the mark to begin the next pass with."""
        state = None if self._own is None else self._own.get()
        return {"state": state, "batch": 0, "ended": False}


def _methods(owner: Any) -> _Methods | None:
    for get, put in _NAMES:
        found = getattr(owner, get, None), getattr(owner, put, None)
        if all(map(callable, found)):
            return _Methods(*found)  # type: ignore[arg-type]
    return None
