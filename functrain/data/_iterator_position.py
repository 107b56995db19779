"""Saves and restores the position of an iterator."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from functrain.common._types import PyTree
from functrain.data._same_data import Summary, summary

# Iterators of grain have the first pair of methods, loaders of torchdata the second pair.
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class _StateMethods(NamedTuple):
    """The methods of an object that read and write its state."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


class IteratorPosition:
    """Tracks the position of a pass over an iterable, once it `is_tracked`.

    The iterable's state must be read only while no batch is fetched ahead, or that batch would be
    lost. So a position is the latest state that was read, and the number of batches taken until
    then.

    Args:
      data: An iterable. Its own methods `state_dict` and `load_state_dict`, or `get_state` and
        `set_state`, are used if it has them, otherwise those of its iterator.

    Attributes:
      is_tracked: True if states and the first batches of passes are recorded.
      taken: Batches of the pass that were returned to the engine.
      ended: True if the pass has no more batches.
      saved: The last position: `state`, None if the data have none; `batch`, the number of batches
        taken; `ended`.
      first_seen: A summary of the first batch fetched in this pass; empty before.
      run_start: The `state` before the run's first batch, and a summary of that `batch`.
    """

    def __init__(self, data: Any) -> None:
        self._data, self.is_tracked = data, False
        # The methods of the data, or None: then `begin` looks for those of the iterator.
        self._methods_of_data = self._methods = _state_methods(data)
        self.saved = position()
        self.taken, self.ended = 0, False
        self.first_seen: Summary = {}
        self.run_start: dict[str, Any] | None = None

    def begin(self, saved: dict[str, Any]) -> Iterator[Any]:
        """Begins a pass at a saved position."""
        self.taken, self.ended, self.first_seen = saved["batch"], saved["ended"], {}
        has_state = saved["state"] is not None
        # A loader of torchdata takes a state before it is iterated, an iterator of grain after.
        if self._methods_of_data is not None and has_state:
            self._methods_of_data.write(saved["state"])
        # Iterating a pass again that has ended would begin the next one.
        iterator: Iterator[Any] = iter(()) if self.ended else iter(self._data)
        self._methods = self._methods_of_data or _state_methods(iterator)
        if self._methods_of_data is None and self._methods is not None and has_state:
            self._methods.write(saved["state"])
        self.save()
        return iterator

    def record_first(self, batch: PyTree) -> None:
        """Records a summary of the first batch that a pass has fetched."""
        if self.is_tracked:
            self.first_seen = summary(batch)
            self.run_start = self.run_start or {
                "state": self.saved["state"],
                "batch": self.first_seen,
            }

    def save(self) -> None:
        """Reads the state, after all fetched batches have been taken."""
        if self.is_tracked:
            # Copied, since an iterator may keep changing the object that it returns.
            state = None if self._methods is None else copy.deepcopy(self._methods.read())
            # Without a state, resuming skips batches from the beginning of the pass.
            has_position = self.ended or self._methods is not None
            self.saved = position(state, self.taken if has_position else 0, self.ended)

    def next_epoch(self) -> dict[str, Any]:
        """Returns the position at which the next pass begins."""
        return position(None if self._methods_of_data is None else self._methods_of_data.read())


def position(state: Any = None, batch: int = 0, ended: bool = False) -> dict[str, Any]:
    """Returns a position as it is saved; by default the start of a pass."""
    return {"state": state, "batch": batch, "ended": ended}


def _state_methods(owner: Any) -> _StateMethods | None:
    """Returns the methods that read and set a state; None if there are none."""
    for names in _METHODS:
        read, write = (getattr(owner, name, None) for name in names)
        if callable(read) and callable(write):
            return _StateMethods(read, write)
    return None
