"""An iterator of batches whose next batch can be looked at before it is taken."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from functrain.common._tree import signature as signature_of

T = TypeVar("T")


class Lookahead(Generic[T]):
    """An iterator that yields items in runs of equal shapes, and shows the next one.

    If the iterable raises, the items before the error are yielded first.

    Args:
      items: The items, none of which is None.
      signature: Returns a value that is equal for two items that can be stacked.
    """

    def __init__(
        self, items: Iterable[T], signature: Callable[[T], Hashable] = signature_of
    ) -> None:
        self._items, self._signature = iter(items), signature
        # An item that was fetched and not taken yet, or the error that comes after the items.
        self._next: T | None = None
        self._error: Exception | None = None

    @property
    def is_ahead(self) -> bool:
        """True if more was fetched than was taken."""
        return self.has_next or self._error is not None

    @property
    def has_next(self) -> bool:
        """True if an item was fetched and not taken yet."""
        return self._next is not None

    def peek(self) -> T | None:
        """Fetches the next item if necessary, and returns it; None at the end."""
        if self._next is None:
            if self._error is not None:
                raise self._error
            self._next = next(self._items, None)
        return self._next

    def replace_next(self, item: T) -> None:
        """Replaces the item that `peek` has returned."""
        self._next = item

    def take(self, limit: int) -> Iterator[T]:
        """Yields the next item, and at most `limit` in all that can be stacked with it."""
        first, self._next = self.peek(), None
        if first is None:
            return
        # Before the yield: the source may reuse the memory of an item.
        signature = self._signature(first)
        yield first
        try:
            for item in itertools.islice(self._items, limit - 1):
                if self._signature(item) != signature:
                    self._next = item
                    return
                yield item
        except Exception as error:
            # Raised by the next `peek`: the items so far are a chunk.
            self._error = error
