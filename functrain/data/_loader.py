"""ArrayLoader: batches of arrays, in an order that is a pure function of seed and epoch."""

import abc
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _repr, _tree
from functrain.common._arguments import argument_advice
from functrain.common._checks import (
    is_integer,
    require,
    require_flags,
    require_integer,
    require_no_problems,
    require_one_of,
)
from functrain.common._compile import jit_without_arithmetic
from functrain.common._types import PyTree
from functrain.common._wide_integers import is_cheap_to_read, is_narrowed, require_integers_fit
from functrain.data import _buffer
from functrain.data._arrays import host_arrays
from functrain.data._batches import Batches, Chunk
from functrain.data._stack import pad_chunk


class SeekableLoader(abc.ABC):
    """Base of loaders that return any batch by the number of its epoch and its index.

    Attributes:
      examples: Examples in an epoch.
      batch_size: Examples per batch, B.
      drop_remainder: True if a smaller last batch is dropped.
    """

    examples: int
    batch_size: int
    drop_remainder: bool

    def __len__(self) -> int:
        """Returns the number of batches per epoch, including a smaller last one."""
        has_smaller = self.remainder > 0 and not self.drop_remainder
        return self.full_batches + has_smaller

    def __iter__(self) -> NoReturn:
        """Raises TypeError: a loader has no state, so it cannot know which epoch is meant."""
        raise TypeError(
            f"{_repr.class_with_article(self)} is iterated epoch by epoch: `for batch in "
            "loader.epoch(0)`. The order is a function of the epoch's number, so you must pass it."
        )

    @property
    def full_batches(self) -> int:
        """Batches per epoch that hold `batch_size` examples."""
        return self.examples // self.batch_size

    @property
    def remainder(self) -> int:
        """Examples in a smaller last batch; 0 if the last batch is full."""
        return self.examples % self.batch_size

    @property
    def dropped(self) -> int:
        """Examples of an epoch that are in none of its batches."""
        return self.remainder if self.drop_remainder else 0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[PyTree]:
        """Yields the batches of an epoch, from number `start` on."""
        for index in range(start, len(self)):
            yield self.batch(epoch, index)

    @abc.abstractmethod
    def batch(self, epoch: int, index: int) -> PyTree:
        """Returns one batch; the last one may be smaller."""

    @abc.abstractmethod
    def chunk(self, epoch: int, start: int, k: int) -> PyTree:
        """Returns the K full batches from number `start` on, stacked."""

    @abc.abstractmethod
    def shapes(self, examples: int) -> PyTree:
        """Returns the shapes and dtypes of a batch with a number of examples."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns properties that distinguish these batches from others, for a resumed run."""


class ArrayLoader(SeekableLoader):
    """Divides a pytree of arrays into batches, which can be accessed in any order.

    A loader has no state: the order of an epoch is a pure function of the seed and the epoch's
    number. So the position is a function of the step, and a resumed run gets the batches that the
    uninterrupted run would have got. A fit of a state that has taken steps before continues with
    the orders of the epochs after them.

    Args:
      data: Pytree of arrays, every leaf `[N, ...]` with the same N: NumPy arrays (memory-mapped
        ones stay on disk) or anything that `np.asarray` accepts. Batches have the byte order of
        the machine.
      batch_size: Examples per batch, B.
      shuffle: True to draw a new order each epoch, from ``Philox(key=[seed, epoch])``.
      seed: Seed of the order; at least 0, and below 2**64.
      drop_remainder: True to drop the last batch if it is smaller than B.
      placement: ``"host"`` keeps the data in host memory and copies each batch to the device.
        ``"device"`` puts all data on the default device once and gathers batches there: the
        device needs memory for all of it, and no batch has to be transferred.

    With ``placement="host"`` every chunk is copied when it is made, so you may change the arrays in
    place between epochs. Do it at the last `ChunkEnd` of an epoch, as with a hook that is due
    ``functrain.every(steps=len(loader))``: at `EpochEnd`, the first chunk of the next epoch has
    been copied already. With ``"device"`` all data are copied when the loader is made: a change
    after that has no effect.

    Dtypes are kept: leave `uint8` images as they are, and cast and scale them in the step, on the
    device, where this costs little.

    Raises:
      ValueError: There are no data, leaves have different lengths, `batch_size` is below 1 or
        above N, or jax would cut integers to 32 bits. Arrays that are memory-mapped, or windows of
        other arrays, are checked chunk by chunk instead.
      TypeError: A leaf is a list of numbers, or has a dtype that jax does not support.

    Examples:
      >>> loader = ArrayLoader({"x": np.arange(10)}, batch_size=4)
      >>> len(loader)
      3
      >>> [batch["x"].tolist() for batch in loader.epoch(0)]
      [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
      >>> loader.chunk(epoch=0, start=0, k=2)["x"].shape
      (2, 4)
    """

    @argument_advice("It is ArrayLoader((x, y), batch_size): all arrays go into one pytree.")
    def __init__(
        self,
        data: PyTree,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
        placement: Literal["host", "device"] = "host",
    ) -> None:
        require_one_of("placement", placement, ("host", "device"))
        require_flags(shuffle=shuffle, drop_remainder=drop_remainder)
        is_data = not isinstance(data, int | SeekableLoader)
        advice = "Pass ArrayLoader((x, y), batch_size)."
        require(is_data, "data", "a pytree of arrays", data, advice, error=TypeError)
        self.data = host_arrays(data)
        self.examples = _common_length(self.data)
        is_valid = is_integer(batch_size, 1) and batch_size <= self.examples
        # An array here is a common mistake: ArrayLoader(x, y).
        advice = advice if _tree.is_array(batch_size) else ""
        expected = f"1 to {self.examples}, the number of examples"
        require(is_valid, "batch_size", expected, batch_size, advice)
        require_integer("seed", seed, 0)
        require(seed < 2**64, "seed", "an integer below 2**64", seed)
        self.batch_size = int(batch_size)
        self.shuffle = shuffle
        self.seed = int(seed)
        self.drop_remainder = drop_remainder
        self.placement = placement

        # Reading all integers of a memory-mapped array would read the file, and a view of sliding
        # windows repeats its numbers many times. Such arrays are checked chunk by chunk.
        def is_checked_now(x: np.ndarray) -> bool:
            return placement == "device" or is_cheap_to_read(x)

        # A None is no leaf, so the paths in errors stay the same.
        checked_now = jax.tree.map(lambda x: x if is_checked_now(x) else None, self.data)
        require_integers_fit(checked_now, "data")
        checked_later = itertools.filterfalse(is_checked_now, jax.tree.leaves(self.data))
        self._checks_chunks = any(map(is_narrowed, checked_later))
        if placement == "device":
            self.data = jax.tree.map(lambda x: jnp.asarray(_to_native_order(x)), self.data)
        # The last order that was drawn, and its epoch: every chunk of the epoch needs it.
        self._cached_order: tuple[int, np.ndarray] | None = None

    def __repr__(self) -> str:
        return _repr.call(self, **self._settings(), placement=self.placement)

    def _settings(self) -> dict[str, Any]:
        names = ("examples", "batch_size", "shuffle", "seed", "drop_remainder")
        return {name: getattr(self, name) for name in names}

    def order(self, epoch: int) -> np.ndarray:
        """Returns the order of the examples in an epoch, `i64[N]`."""
        if not self.shuffle:
            return np.arange(self.examples)
        # Read once: another thread may store the order of another epoch at any time.
        cached = self._cached_order
        if cached is None or cached[0] != epoch:
            # Philox takes the epoch as a part of its key, so no epoch depends on an earlier one.
            key = np.array([self.seed, epoch], np.uint64)
            generator = np.random.Generator(np.random.Philox(key=key))
            cached = self._cached_order = (epoch, generator.permutation(self.examples))
        return cached[1]

    def batch(self, epoch: int, index: int) -> PyTree:
        """Returns one batch, leaves `[B, ...]`; the last one may be smaller."""
        if not 0 <= index < len(self):
            raise IndexError(f"index: expected 0 to {len(self) - 1}, got {index}")
        start = index * self.batch_size
        return self._take(epoch, start, min(start + self.batch_size, self.examples))

    def chunk(self, epoch: int, start: int, k: int) -> PyTree:
        """Returns the K full batches from number `start` on, stacked: leaves `[K, B, ...]`."""
        if not (start >= 0 and k >= 1 and start + k <= self.full_batches):
            raise IndexError(
                f"chunk: expected batches within 0 to {self.full_batches - 1} (the full ones), "
                f"got {start} to {start + k - 1}"
            )
        size = self.batch_size
        # One gather for all K batches, which are adjacent in the epoch's order.
        rows = self._take(epoch, start * size, (start + k) * size)
        return jax.tree.map(lambda x: x.reshape(k, size, *x.shape[1:]), rows)

    def shapes(self, examples: int) -> PyTree:
        """Returns the shapes and dtypes of a batch with a number of examples."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), self.data
        )

    def fingerprint(self) -> dict[str, Any]:
        """Returns properties that distinguish these batches from others, for a resumed run."""
        # The values of the data are not compared, only their specs and the settings.
        specs = {path: _tree.strong_spec(x) for path, x in _tree.leaves_with_path(self.shapes(1))}
        return {"data": "ArrayLoader", **self._settings(), "batch": specs}

    def _take(self, epoch: int, start: int, stop: int) -> PyTree:
        """Copies the examples between two positions of an epoch's order."""
        if self.placement == "device":
            # All leaves together, so that the gather is one program. i32 indices reach 2**31
            # examples.
            return _gather(self.data, self.order(epoch)[start:stop].astype(np.int32))
        # Always a copy, even of adjacent rows: the user may change `data` while a device reads.
        if self.shuffle:
            rows = self.order(epoch)[start:stop]
            examples = jax.tree.map(lambda x: _buffer.take(x, rows), self.data)
        else:
            examples = jax.tree.map(lambda x: _buffer.copy(x[start:stop]), self.data)
        if self._checks_chunks:
            require_integers_fit(examples, "data")
        return examples


def _to_native_order(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder("="), copy=False)


@jit_without_arithmetic
def _gather(data: PyTree, rows: jax.Array) -> PyTree:
    return jax.tree.map(lambda x: x[rows], data)


def _common_length(data: PyTree) -> int:
    """Returns the number of examples.

    Raises:
      ValueError: There are none, or leaves have different lengths.
    """
    lengths = set()
    lines = []
    for path, x in _tree.leaves_with_path(data):
        lengths.add(x.shape[0] if x.ndim else None)
        lines.append(f"{path}: {x.shape[0]} examples" if x.ndim else f"{path}: a scalar")
    require(lengths, "data", "a pytree of arrays, with at least one leaf", data)
    if len(lengths) > 1 or None in lengths:
        require_no_problems(
            "data",
            lines,
            "leaves of one length, the number of examples",
            "For several inputs pass a tuple or dict of arrays, not a list of examples.",
        )
    (length,) = lengths
    if not length:
        raise ValueError("data: expected at least one example, got none (every leaf has length 0)")
    return int(length)


class LoaderBatches(Batches):
    """Batches of a loader that can seek; full batches are gathered K at a time.

    Args:
      loader: The loader.
      name: The argument that it was passed as, for errors.
    """

    can_seek = True

    def __init__(self, loader: SeekableLoader, name: str = "data") -> None:
        self.data: SeekableLoader = loader
        self.name = name
        self.steps: int = len(loader)
        self._epoch = self._next = 0
        self._steps_before = 0
        # Cached, since every `peek` needs them. It also makes all full batches of a run the same
        # object, by which `Plan` recognizes them.
        self._shapes = functools.cache(loader.shapes)

    @property
    def full_steps(self) -> int:
        """Batches of full size in an epoch."""
        return self.data.full_batches

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch at one of its batches."""
        self._epoch, self._next = epoch + self.epochs_before, batch

    def peek(self) -> PyTree | None:
        """Returns the shapes of the next batch; `take` makes the batch."""
        if self._next >= self.steps:
            return None
        return self._shapes(self._examples())

    def take(self, k: int, limit: int) -> Chunk:
        """Gathers the next batches."""
        loader, start, examples = self.data, self._next, self._examples()
        steps = max(1, min(limit, loader.full_batches - start))
        self._next += steps
        if start < loader.full_batches:
            batches = pad_chunk(loader.chunk(self._epoch, start, steps), k)
        else:
            batches = jax.tree.map(lambda x: x[None], loader.batch(self._epoch, start))
        return Chunk(batches, k, steps, examples)

    def full_batch(self) -> PyTree:
        """Returns the shapes of a batch of full size."""
        return self._shapes(self.data.batch_size)

    def known_shapes(self) -> list[PyTree]:
        """Returns the shapes of a full batch, and of a smaller last one."""
        has_smaller = len(self.data) > self.data.full_batches
        return [self.full_batch(), *([self._shapes(self.data.remainder)] * has_smaller)]

    def fingerprint(self) -> dict[str, Any]:
        """Returns the fingerprint of the loader."""
        return dict(self.data.fingerprint())

    def state(self, *, epoch_is_over: bool) -> dict[str, Any] | None:
        """Returns the number of steps before those of this run; None if there are none."""
        # The loader itself has no state.
        return {"steps_before": self._steps_before} if self._steps_before else None

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Restores the number of earlier steps, whatever the state of this run has counted."""
        self._steps_before = 0 if state is None else state["steps_before"]
        return []

    def continue_after(self, steps: int) -> None:
        """Continues with the orders that follow a number of earlier steps.

        After a part of an epoch, the next epoch begins with a new order.
        """
        self._steps_before = steps

    @property
    def epochs_before(self) -> int:
        """The number of the loader's epochs before the first one of this run."""
        # Rounded up.
        return -(-self._steps_before // self.steps)

    def _examples(self) -> int:
        is_full = self._next < self.data.full_batches
        return self.data.batch_size if is_full else self.data.remainder
