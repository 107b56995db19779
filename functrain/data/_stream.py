"""A pass over an iterator of batches."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.common._wide_integers import require_integers_fit
from functrain.data import _buffer
from functrain.data._arrays import is_takeable, refuse_mask, refuse_numbers
from functrain.data._batch import batch_size
from functrain.data._resuming import Mark, Place
from functrain.data._stacks import Spec, Stack, fill


class Item(Protocol):
    """A batch on its way into a stack."""

    @property
    def spec(self) -> Spec:
        """Its kind."""

    def arrays(self) -> PyTree:
        """Returns the batch."""

    def stack(self, items: Iterator[Any], k: int) -> Stack:
        """Stacks batches of its kind, itself the first of them, with room for k.

        Each is copied before the next is fetched: its source may use the memory again then.
        """


class StreamPass:
    """A pass over an iterator of batches: each is copied once, into the stack it belongs to.

    If the iterator raises, what came before is handed out first.
    """

    knows_sizes = False

    def __init__(
        self, items: Iterator[Item], first: Item | None = None, place: Place | None = None
    ) -> None:
        self._items, self._first, self._place = items, first, place
        self._waiting: Item | None = None
        self._failure: Exception | None = None

    def usual(self) -> tuple[Spec, PyTree] | None:
        """Returns the first of the batches, if it is known and none of those to come."""
        return None if self._first is None else (self._first.spec, self._first.arrays())

    def spec(self) -> Spec | None:
        """Returns the kind of the next batch, which is fetched for that."""
        if self._waiting is None:
            if self._failure is not None:
                raise self._failure
            self._waiting = next(self._items, None)
        return None if self._waiting is None else self._waiting.spec

    def peek(self) -> PyTree:
        """Returns the next batch."""
        assert self._waiting is not None, "spec() comes first"
        return self._waiting.arrays()

    def take(self, most: int, k: int) -> Stack:
        """Stacks the next batches."""
        item, self._waiting = self._waiting, None
        assert item is not None, "spec() comes first"
        found = item.stack(itertools.islice(self._from(item), most), k)
        if self._place is not None:
            self._place.taken += found.steps
        return found

    @property
    def ahead(self) -> int:
        """How many batches were fetched to look at, and not handed out yet: 0 or 1."""
        return int(self._waiting is not None)

    def mark(self, over: bool) -> Mark | None:
        """Returns where the pass is, if that is noted; of one that is over, the next one's."""
        if self._place is None:
            return None
        if over:
            return self._place.at_the_end()
        if self._waiting is None and self._failure is None:
            self._place.mark()
        return self._place.marked

    def _from(self, item: Item) -> Iterator[Item]:
        """Yields a batch and those after it that are of the same kind."""
        yield item
        try:
            for found in self._items:
                if found.spec != item.spec:
                    self._waiting = found
                    return
                yield found
        except Exception as error:
            self._failure = error


def made_of(
    batches: Iterator[PyTree], name: str, epoch: int, first: int, place: Place | None
) -> Iterator["Made"]:
    """Yields the batches of an iterator, the first of which has a number, and tells the place.

    Raises:
      TypeError: (when met) a leaf is no array of numbers.
    """
    for number, batch in enumerate(batches, first):
        if number == first:
            refuse_numbers(batch, f"{name}: batch {number}", (list,))  # a tuple may be of scalars
        made = Made.of(batch, f"batch {number} of epoch {epoch} of {name}")
        if place is not None and number == first:
            place.saw(made.batch)
        yield made
    if place is not None:
        place.ended = True


class Made(NamedTuple):
    """A batch that its source made.

    Attributes:
      batch: NumPy or jax arrays.
      spec: Its structure, shapes and dtypes.
      mark: What else the source says of it.
    """

    batch: PyTree
    spec: Spec
    mark: Any = None

    @classmethod
    def of(cls, batch: PyTree, where: str = "data") -> "Made":
        """Takes tensors of other libraries as NumPy; jax arrays stay where they are."""
        leaves, structure = jax.tree.flatten(batch)
        found = [x if isinstance(x, jax.Array) else _numpy(x, batch, where) for x in leaves]
        spec = structure, [(x.shape, x.dtype) for x in found]
        return cls(jax.tree.unflatten(structure, found), spec)

    def arrays(self) -> PyTree:
        """Returns the batch."""
        return self.batch

    def stack(self, items: Iterator["Made"], k: int) -> Stack:
        """Copies batches into fresh memory; jax arrays are stacked on their device."""
        leaves, structure = jax.tree.flatten(self.batch)
        rows: list[Any] = [
            [] if isinstance(x, jax.Array) else _buffer.empty((k, *x.shape), x.dtype)
            for x in leaves
        ]
        marks: list[Any] = []
        for item in items:
            for row, x in zip(rows, jax.tree.leaves(item.batch), strict=True):
                if isinstance(row, list):
                    row.append(x)
                else:
                    row[len(marks)] = x
            marks.append(item.mark)
        for i, row in enumerate(rows):
            if isinstance(row, list):
                rows[i] = fill(jnp.stack(row), k)
            else:
                row[len(marks) :] = 0
        batches = jax.tree.unflatten(structure, rows)
        require_integers_fit(batches, "data")
        return Stack(batches, len(marks), batch_size(self.batch), marks)


def _numpy(leaf: Any, batch: PyTree, where: str) -> np.ndarray:
    def path() -> str:
        return next(path for path, y in _tree.leaves_with_path(batch) if y is leaf)

    refuse_mask(leaf, "data", lambda: f" at {path()} of {where}")
    x = np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
    if not is_takeable(x.dtype):
        raise TypeError(
            f"data: expected batches of numbers, got {type(leaf).__name__} of {x.dtype} at "
            f"{path()} of {where}. Convert it first."
        )
    return x
