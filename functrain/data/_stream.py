"""A pass over an iterator of batches."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.data import _buffer
from functrain.data._arrays import is_takeable
from functrain.data._batch import batch_size
from functrain.data._stacks import Spec, Stack, fill


class Item(Protocol):
    """A batch on its way into a stack."""

    @property
    def spec(self) -> Spec:
        """Its kind."""

    def arrays(self) -> PyTree:
        """Returns the batch."""

    def stack(self, k: int) -> "Stacker":
        """Returns room for k batches of its kind."""


class Stacker(Protocol):
    """Takes in batches alike, one by one."""

    def add(self, item: Any) -> None:
        """Takes in a batch. Its source may use the memory again afterwards."""

    def whole(self) -> Stack:
        """Returns them all."""


class StreamPass:
    """A pass over an iterator of batches: each is copied once, into the stack it belongs to.

    If the iterator raises, what came before is handed out first.
    """

    def __init__(self, items: Iterator[Item], skipped: Item | None = None) -> None:
        self._items, self._skipped = items, skipped
        self._waiting: Item | None = None
        self._failure: Exception | None = None

    def usual(self) -> tuple[Spec, PyTree] | None:
        """Returns the first of the batches that were left out."""
        return None if self._skipped is None else (self._skipped.spec, self._skipped.arrays())

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
        stack, steps = item.stack(k), 1
        stack.add(item)
        while steps < most and (found := self._next_like(item)) is not None:
            stack.add(found)
            steps += 1
        return stack.whole()

    def _next_like(self, item: Item) -> Item | None:
        """Fetches the next batch and returns it, if it is there and of the same kind."""
        try:
            found = next(self._items, None)
        except Exception as error:
            self._failure = error
            return None
        if found is None or found.spec == item.spec:
            return found
        self._waiting = found
        return None


def stream(data: Iterable[PyTree], name: str, epoch: int, start: int) -> StreamPass:
    """Begins a pass over an iterable, at the given batch: those before it are left out.

    Raises:
      ValueError: There are not so many batches.
      TypeError: (when met) a leaf is no array of numbers.
    """
    items = _items(iter(data), name, epoch)
    skipped = list(itertools.islice(items, min(start, 1)))
    number = len(skipped) + sum(1 for _ in itertools.islice(items, max(0, start - 1)))
    if number < start:
        raise ValueError(
            f"start: expected more than {start} batches in epoch {epoch} of {name}, got "
            f"{number}. The data are not those of the first run."
        )
    return StreamPass(items, *skipped)


def _items(batches: Iterator[PyTree], name: str, epoch: int) -> Iterator["Made"]:
    for number, batch in enumerate(batches):
        yield Made.of(batch, f"batch {number} of epoch {epoch} of {name}")


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
    def of(cls, batch: PyTree, where: str = "data", mark: Any = None) -> "Made":
        """Takes tensors of other libraries as NumPy; jax arrays stay where they are."""
        leaves, structure = jax.tree.flatten(batch)
        found = [x if isinstance(x, jax.Array) else _numpy(x, batch, where) for x in leaves]
        spec = structure, [(x.shape, x.dtype) for x in found]
        return cls(jax.tree.unflatten(structure, found), spec, mark)

    def arrays(self) -> PyTree:
        """Returns the batch."""
        return self.batch

    def stack(self, k: int) -> "ArrayStacker":
        """Returns room for k batches of its kind."""
        return ArrayStacker(self.batch, k)


class ArrayStacker:
    """Room for k batches of one kind."""

    def __init__(self, like: PyTree, k: int) -> None:
        leaves, self._structure = jax.tree.flatten(like)
        self._leaves = [
            _JaxStack(k) if isinstance(x, jax.Array) else _NumPyStack(x, k) for x in leaves
        ]
        self._examples = batch_size(like)
        self._marks: list[Any] = []

    def add(self, item: Made) -> None:
        """Copies a batch."""
        for stack, leaf in zip(self._leaves, jax.tree.leaves(item.batch), strict=True):
            stack.add(leaf)
        self._marks.append(item.mark)

    def whole(self) -> Stack:
        """Returns them all, filled up with zeros."""
        batches = jax.tree.unflatten(self._structure, [stack.whole() for stack in self._leaves])
        return Stack(batches, len(self._marks), self._examples, self._marks)


def _numpy(leaf: Any, batch: PyTree, where: str) -> np.ndarray:
    x = np.asarray(leaf.numpy() if hasattr(leaf, "numpy") else leaf)
    if not is_takeable(x.dtype):
        at = next(path for path, y in _tree.leaves_with_path(batch) if y is leaf)
        raise TypeError(
            f"data: expected batches of numbers, got {type(leaf).__name__} of {x.dtype} at {at} "
            f"of {where}. Convert it first."
        )
    return x


class _NumPyStack:
    """Room for K arrays of one shape; what is not used stays zero."""

    def __init__(self, like: np.ndarray, k: int) -> None:
        self._rows = _buffer.empty((k, *like.shape), like.dtype.newbyteorder("="))
        self._n = 0

    def add(self, x: np.ndarray) -> None:
        self._rows[self._n] = x
        self._n += 1

    def whole(self) -> np.ndarray:
        self._rows[self._n :] = 0
        return self._rows


class _JaxStack:
    """As `_NumPyStack`, for arrays that are on a device and stay there."""

    def __init__(self, k: int) -> None:
        self._rows: list[jax.Array] = []
        self._k = k

    def add(self, x: jax.Array) -> None:
        self._rows.append(x)

    def whole(self) -> jax.Array:
        return fill(jnp.stack(self._rows), self._k)
