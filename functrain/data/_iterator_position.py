"""The position of an iterator, to be saved and restored."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from functrain.common._types import PyTree
from functrain.data._same_data import Summary, summary

# Iterators of grain have the first pair of methods, loaders of torchdata the second.
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class IteratorPosition:
    """Notes where a pass over an iterable is.

    The iterable's state can be read only while no batch is fetched ahead, or that batch would be
    lost. So a position is the last state that was read, and the number of batches taken until then.

    Args:
      data: An iterable. If it has `state_dict` and `load_state_dict` these are used, else those
        methods of its iterator, or `get_state` and `set_state`.

    Attributes:
      taken: Batches of the pass that have been handed out.
      ended: True if the pass has no more batches.
      saved: The last position: `state`, None if the data do not say; `batch`, the number of
        batches taken; `ended`.
      first_seen: A summary of the first batch fetched in this pass.
      run_start: How the run began: the `state` before its first batch, a summary of that `batch`.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._methods_of_data = self._methods = _state_methods(data)
        self.saved: dict[str, Any] = {"state": None, "batch": 0, "ended": False}
        self.taken, self.ended = 0, False
        self.first_seen: Summary | None = None
        self.run_start: dict[str, Any] | None = None

    def begin(self, saved: dict[str, Any] | None) -> tuple[Iterator[Any], int]:
        """Begins a pass, at a saved position; returns its iterator and its first batch's number."""
        saved = {"state": None, "batch": 0, "ended": False} if saved is None else saved
        self.taken, self.ended, self.first_seen = saved["batch"], saved["ended"], None
        has_state = saved["state"] is not None
        if self._methods_of_data is not None and has_state:
            self._methods_of_data[1](saved["state"])
        iterator = iter(()) if self.ended else iter(self._data)
        self._methods = self._methods_of_data or _state_methods(iterator)
        if self._methods_of_data is None and self._methods is not None and has_state:
            self._methods[1](saved["state"])
        self.save()
        return iterator, self.taken

    def saw(self, batch: PyTree) -> None:
        """Notes the first batch that a pass has fetched."""
        self.first_seen = summary(batch)
        if self.run_start is None:
            self.run_start = {"state": self.saved["state"], "batch": self.first_seen}

    def save(self) -> None:
        """Reads the state, after all fetched batches have been handed out."""
        state = None if self._methods is None else copy.deepcopy(self._methods[0]())
        # Without a state the batches are counted from the beginning of the pass.
        is_known = self.ended or self._methods is not None
        self.saved = {
            "state": state,
            "batch": self.taken if is_known else 0,
            "ended": self.ended,
        }

    def next_epoch(self) -> dict[str, Any]:
        """Returns the position at which the next pass begins."""
        state = None if self._methods_of_data is None else self._methods_of_data[0]()
        return {"state": state, "batch": 0, "ended": False}


def _state_methods(owner: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Returns the methods that read and set a state, if there are any."""
    for get, put in _METHODS:
        read, write = getattr(owner, get, None), getattr(owner, put, None)
        if callable(read) and callable(write):
            return read, write
    return None
