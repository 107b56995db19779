"""Batches of arrays in memory, in an order that is a pure function of seed and epoch."""

import abc
import functools
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _repr, _tree
from functrain.common._arguments import argument_advice
from functrain.common._checks import is_integer, require_flags, require_integer, require_one_of
from functrain.common._compile import jit_without_arithmetic
from functrain.common._types import PyTree
from functrain.common._wide_integers import is_cheap_to_read, is_narrowed, require_integers_fit
from functrain.data import _buffer
from functrain.data._arrays import host_arrays
from functrain.data._batches import Batches, Chunk
from functrain.data._stack import pad_chunk


class SeekableLoader(abc.ABC):
    """Batches any of which can be asked for, by the numbers of its epoch and of itself.

    Attributes:
      examples: In an epoch.
      batch_size: Examples per batch, B.
      drop_remainder: Whether a smaller last batch is left out.
    """

    examples: int
    batch_size: int
    drop_remainder: bool

    def __len__(self) -> int:
        """Batches per epoch, a smaller last one included."""
        whole, rest = divmod(self.examples, self.batch_size)
        return whole + (rest > 0 and not self.drop_remainder)

    def __iter__(self) -> NoReturn:
        """Refused: a loader without state cannot know which epoch is meant."""
        raise TypeError(
            f"{_repr.class_with_article(self)} is iterated epoch by epoch: `for batch in "
            "loader.epoch(0)`. The order is a function of the epoch's number, so it has to be told."
        )

    @property
    def full_batches(self) -> int:
        """Batches per epoch that hold `batch_size` examples."""
        return self.examples // self.batch_size

    @property
    def remainder(self) -> int:
        """Examples in the last batch where it is smaller; 0 where it is not."""
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
        """Returns one batch; the last may be smaller."""

    @abc.abstractmethod
    def chunk(self, epoch: int, start: int, k: int) -> PyTree:
        """Returns the K full batches from number `start` on, stacked."""

    @abc.abstractmethod
    def shapes(self, examples: int) -> PyTree:
        """Returns the shapes and dtypes of a batch of so many examples."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells these batches from others, for a run that goes on with them."""


class ArrayLoader(SeekableLoader):
    """Cuts a pytree of arrays into batches; any position can be sought.

    It has no state: the order of an epoch is a pure function of the seed and the epoch's number,
    so position is a function of the step, and a resumed run sees what it would have seen. A fit of
    a state that has taken steps before takes the orders of the epochs that come after them.

    Args:
      data: Pytree of arrays, every leaf `[N, ...]` with the same N: NumPy arrays (memory-mapped
        ones stay on disk) or anything `np.asarray` takes. Batches come in the byte order of the
        machine.
      batch_size: Examples per batch, B.
      shuffle: Draw a new order each epoch, from ``Philox(key=[seed, epoch])``.
      seed: Of the order; at least 0.
      drop_remainder: Leave out the last batch where it is smaller than B.
      placement: ``"host"`` keeps the data where it is and copies each batch to the device.
        ``"device"`` puts all of it on the default device once and gathers batches there: the
        device needs room for it, and no batch has to travel.

    Bytes stay bytes: leave `uint8` images as they are and cast and scale them in the step, on the
    device, where that costs little.

    Raises:
      ValueError: No data, leaves of different lengths, `batch_size` below 1 or above N, or
        integers that jax would cut to 32 bits; of arrays that are memory-mapped, or windows of
        others, each chunk is looked at when it is made.
      TypeError: A leaf is no array of numbers that jax can take, or a list of numbers.

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
        self.data = host_arrays(data)
        self.examples = _common_length(self.data)
        if not is_integer(batch_size, 1) or batch_size > self.examples:
            raise ValueError(
                f"batch_size: expected 1 to {self.examples}, the number of examples, got "
                f"{_repr.brief(batch_size)}."
                + " It is ArrayLoader((x, y), batch_size)."
                * _tree.is_array(batch_size)
            )
        require_integer("seed", seed, 0)
        self.batch_size = int(batch_size)
        self.shuffle = shuffle
        self.seed = int(seed)
        self.drop_remainder = drop_remainder
        self.placement = placement

        def is_read_now(x: np.ndarray) -> bool:
            return placement == "device" or is_cheap_to_read(x)

        read_now = jax.tree.map(lambda x: x if is_read_now(x) else None, self.data)
        require_integers_fit(read_now, "data")
        read_later = [x for x in jax.tree.leaves(self.data) if not is_read_now(x)]
        self._checks_chunks = any(map(is_narrowed, read_later))
        if placement == "device":
            self.data = jax.tree.map(lambda x: jnp.asarray(_native(x)), self.data)
        self._drawn: tuple[int, np.ndarray] | None = None

    def __repr__(self) -> str:
        return _repr.call(self, **self._settings(), placement=self.placement)

    def _settings(self) -> dict[str, Any]:
        names = ("examples", "batch_size", "shuffle", "seed", "drop_remainder")
        return {name: getattr(self, name) for name in names}

    def order(self, epoch: int) -> np.ndarray:
        """Returns the order of the examples in an epoch, `i64[N]`."""
        if not self.shuffle:
            return np.arange(self.examples)
        if self._drawn is None or self._drawn[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._drawn = (epoch, generator.permutation(self.examples))
        return self._drawn[1]

    def batch(self, epoch: int, index: int) -> PyTree:
        """Returns one batch, leaves `[B, ...]`; the last may be smaller."""
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
        rows = self._take(epoch, start * size, (start + k) * size)
        return jax.tree.map(lambda x: x.reshape(k, size, *x.shape[1:]), rows)

    def shapes(self, examples: int) -> PyTree:
        """Returns the shapes and dtypes of a batch of so many examples."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), self.data
        )

    def fingerprint(self) -> dict[str, Any]:
        """Returns what tells these batches from others, for a run that goes on with them."""
        like = {path: _tree.strong_spec(x) for path, x in _tree.leaves_with_path(self.shapes(1))}
        return {"data": "ArrayLoader", **self._settings(), "batch": like}

    def _take(self, epoch: int, start: int, stop: int) -> PyTree:
        """Copies the examples at some places of an epoch's order: `data` may change later."""
        if self.placement == "device":
            # As a whole, so that the gather is one program; i32 reaches 2**31 examples.
            return _gather(self.data, self.order(epoch)[start:stop].astype(np.int32))
        if self.shuffle:
            rows = self.order(epoch)[start:stop]
            taken = jax.tree.map(lambda x: _buffer.take(x, rows), self.data)
        else:
            taken = jax.tree.map(lambda x: _buffer.copy(x[start:stop]), self.data)
        if self._checks_chunks:
            require_integers_fit(taken, "data")
        return taken


def _native(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder("="), copy=False)


@jit_without_arithmetic
def _gather(data: PyTree, rows: jax.Array) -> PyTree:
    return jax.tree.map(lambda x: x[rows], data)


def _common_length(data: PyTree) -> int:
    lengths = {path: x.shape[0] if x.ndim else None for path, x in _tree.leaves_with_path(data)}
    if not lengths:
        raise ValueError("data: expected a pytree of arrays, got one without leaves")
    if len(set(lengths.values())) > 1 or None in lengths.values():
        found = [
            f"{path}: {'a scalar' if n is None else f'{n} examples'}" for path, n in lengths.items()
        ]
        raise ValueError(
            "data: expected leaves of one length, the number of examples, got\n"
            f"{_tree.bullets(found)}\nFor several inputs pass a tuple or dict of arrays, not a "
            "list of examples."
        )
    length = next(iter(lengths.values()))
    if not length:
        raise ValueError("data: expected at least one example, got none (every leaf has length 0)")
    return int(length)


class LoaderBatches(Batches):
    """Batches of a loader that can seek: full batches are gathered K at a time.

    Args:
      loader: The loader.
      name: The argument it was passed as, for errors.
    """

    can_seek = True

    def __init__(self, loader: SeekableLoader, name: str = "data") -> None:
        self.data: SeekableLoader = loader
        self.name = name
        self.steps: int = len(loader)
        self._epoch = self._next = 0
        self._steps_before = 0
        self._shapes = functools.cache(loader.shapes)  # asked for with every chunk

    @property
    def full_steps(self) -> int:
        """Batches of full size in an epoch."""
        return self.data.full_batches

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch at one of its batches."""
        self._epoch, self._next = epoch + self.epochs_before, batch

    def peek(self) -> PyTree | None:
        """Returns the shapes of the next batch, which is not made yet."""
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
        """Returns what the loader says of itself."""
        return dict(self.data.fingerprint())

    def state(self, *, epoch_is_over: bool) -> dict[str, Any] | None:
        """Returns the number of steps that the orders come after, if there are any."""
        return {"steps_before": self._steps_before} if self._steps_before else None

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Continues after as many steps as the first run did, whatever the state of this one."""
        self._steps_before = 0 if state is None else state["steps_before"]
        return []

    def continue_after(self, steps: int) -> None:
        """Takes the orders that come after so many steps.

        An epoch is whole: after a part of one, the next order begins.
        """
        self._steps_before = steps

    @property
    def epochs_before(self) -> int:
        """The number of the loader's epochs before the first one of this run."""
        return -(-self._steps_before // self.steps)

    def _examples(self) -> int:
        is_full = self._next < self.data.full_batches
        return self.data.batch_size if is_full else self.data.remainder
