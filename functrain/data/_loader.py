"""ArrayLoader: batches of arrays, in an order that is a pure function of seed and epoch."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from functrain.common import _repr, _tree
from functrain.common._checks import is_integer, require, require_one_of
from functrain.common._types import PyTree
from functrain.common._wide_integers import is_cheap_to_read, require_integers_fit
from functrain.data import _stack
from functrain.data._arrays import host_batch, require_no_number_lists
from functrain.data._batches import SeekableLoader
from functrain.data._on_device import OnDevice, has_room
from functrain.data._same_data import Summary, summary


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
      batch_size: Examples per batch, B. If there are fewer examples, all are one batch.
      shuffle: True to draw a new order each epoch, from ``Philox(key=[seed, epoch])``.
      seed: Seed of the order; at least 0, and below 2**64.
      drop_remainder: True to drop the last batch if it is smaller than B.
      placement: ``"host"`` keeps the data in host memory and copies each chunk to the device.
        ``"device"`` puts all data on the default device once and gathers batches there: the
        device needs memory for all of it, and no batch has to be transferred. ``"auto"`` does
        so in a run on one GPU or TPU, for data that take at most a quarter of its memory, less
        the state; on CPU it is ``"host"``. The batches are the same, bit for bit.
      transform: ``transform(batch, rng) -> batch``, called for every batch, a smaller last one too,
        to augment or convert it on the host. The leaves of the batch are NumPy arrays `[B, ...]`,
        copies that it may change. ``rng`` is a `numpy.random.Generator` that is a pure function of
        seed, epoch and the number of the batch: with no other source of randomness, batches do not
        depend on K, and a resumed run gets the same ones. It may return other arrays, shapes and
        dtypes, for which NumPy arrays or anything that `np.asarray` accepts will do.

    With ``placement="host"``, and on CPU with ``"auto"``, every chunk is copied when it is made, so
    you may change the arrays in place between epochs. Do it at the last `ChunkEnd` of an epoch, as
    with a hook that is due ``functrain.every(steps=len(loader))``: at `EpochEnd`, the first chunk
    of the next epoch has been copied already. Data on a device were copied when the loader was
    made, or with ``"auto"`` when its first run began: a change after that has no effect.

    Dtypes are kept: leave `uint8` images as they are, and cast and scale them in the step, on the
    device, where this costs little.

    Iterating over a loader yields the batches of epoch 0. A subclass may override `order`,
    `batch` or `epoch`, of which a run then makes all of its batches, and `__len__`, to end epochs
    early.

    Raises:
      ValueError: There are no data, leaves have different lengths, `batch_size` is below 1,
        `drop_remainder` drops everything, data on the device have a `transform`, or jax would cut
        integers to 32 bits. Arrays that are memory-mapped, or windows of other arrays, are checked
        chunk by chunk instead.
      TypeError: A leaf is a list of numbers, a dataset that is read item by item, or has a dtype
        that jax does not support.

    Examples:
      >>> loader = ArrayLoader({"x": np.arange(10)}, batch_size=4)
      >>> len(loader)
      3
      >>> [batch["x"].tolist() for batch in loader.epoch(0)]
      [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
      >>> loader.chunk(epoch=0, start=0, k=2)["x"].shape
      (2, 4)
      >>> def flip(images, rng):
      ...     return np.where(rng.random((len(images), 1)) < 0.5, images, images[:, ::-1])
      >>> flipped = ArrayLoader(np.eye(4, 2), batch_size=2, transform=flip)
      >>> [batch.shape for batch in flipped]
      [(2, 2), (2, 2)]
    """

    def __init__(
        self,
        data: PyTree,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
        placement: Literal["auto", "host", "device"] = "auto",
        transform: Callable[[PyTree, np.random.Generator], PyTree] | None = None,
    ) -> None:
        require_one_of("placement", placement, ("auto", "host", "device"))
        require_no_number_lists(data, "data")
        self.data = jax.tree.map(np.asarray, host_batch(data))
        self.examples = _common_length(self.data)
        # An array here is a common mistake: ArrayLoader(x, y).
        advice = "Pass ArrayLoader((x, y), batch_size)."
        require(is_integer(batch_size, 1), "batch_size", "an integer from 1", batch_size, advice)
        if drop_remainder:
            expected = f"1 to {self.examples}, the number of examples, with drop_remainder=True"
            require(batch_size <= self.examples, "batch_size", expected, batch_size)
        is_possible, advice = transform is None or placement != "device", "Do it in the step."
        require(is_possible, "placement", "'auto' or 'host' with a transform", placement, advice)
        is_seed = is_integer(seed, 0) and seed < 2**64
        require(is_seed, "seed", "an integer from 0 to 2**64 - 1", seed)
        self.batch_size = min(int(batch_size), self.examples)
        self.shuffle = shuffle
        self.seed = int(seed)
        self.drop_remainder = drop_remainder
        self.dropped = self.examples % self.batch_size if drop_remainder else 0
        self.placement = placement
        self.transform = transform
        cls = type(self)
        makes_own_batches = (cls.batch, cls.epoch) != (ArrayLoader.batch, ArrayLoader.epoch)
        self._makes_own_order = shuffle or cls.order is not ArrayLoader.order
        # Only the batches themselves can tell what a function of the user makes of them.
        self.knows_shapes = transform is None and not makes_own_batches
        # Reading all integers of a memory-mapped array would read the file, and a view of sliding
        # windows repeats its numbers many times. Then they are checked chunk by chunk.
        is_cheap = all(map(is_cheap_to_read, jax.tree.leaves(self.data)))
        self._checks_chunks = placement != "device" and not is_cheap
        if not self._checks_chunks:
            require_integers_fit(self.data, "data")
        # The data on the device, for chunks; None if they are not there. The first run decides.
        self._on_device: OnDevice | None = None
        self._is_decided = placement != "auto" or not self.knows_shapes or self._checks_chunks
        if placement == "device":
            self._on_device = OnDevice(self.data)
            self.data = self._on_device.data
        # The last order that was drawn, and its epoch: every chunk of the epoch needs it.
        self._cached_order: tuple[int, np.ndarray] | None = None

    def __repr__(self) -> str:
        transform = {} if self.transform is None else {"transform": self.transform}
        return _repr.call(self, **self._settings(), placement=self.placement, **transform)

    def _settings(self) -> dict[str, Any]:
        names = ("examples", "batch_size", "shuffle", "seed", "drop_remainder")
        return {name: getattr(self, name) for name in names}

    def order(self, epoch: int) -> np.ndarray:
        """Returns the order of the examples in an epoch, `i64[N]`; it is read-only."""
        if not self.shuffle:
            return np.arange(self.examples)
        # Read once: another thread may store the order of another epoch at any time.
        cached = self._cached_order
        if cached is None or cached[0] != epoch:
            order = self._generator(epoch).permutation(self.examples)
            # The next chunks are made from it as well.
            order.setflags(write=False)
            cached = self._cached_order = (epoch, order)
        return cached[1]

    def _generator(
        self, epoch: int, counter: tuple[int, ...] = (0, 0, 0, 0)
    ) -> np.random.Generator:
        # The epoch is a part of the key, so no epoch depends on an earlier one.
        key = np.array([self.seed, epoch], np.uint64)
        bits = np.random.Philox(key=key, counter=np.array(counter, np.uint64))
        return np.random.Generator(bits)

    def batch(self, epoch: int, index: int) -> PyTree:
        """Returns one batch, leaves `[B, ...]`; the last one may be smaller."""
        if not 0 <= index < len(self):
            raise IndexError(f"index: expected 0 to {len(self) - 1}, got {index}")
        stacked = self._take(epoch, index, 1, 1, self.placement == "device")
        batch = jax.tree.map(lambda x: x.reshape(x.shape[1:]), stacked)
        if self.transform is None:
            return batch
        # The counter begins far beyond what the order of the epoch draws with the same key.
        batch = self.transform(batch, self._generator(epoch, (0, 0, index, 1)))
        batch = host_batch(batch, f"batch {index} of epoch {epoch}, from the transform")
        require_integers_fit(batch, "data")
        return batch

    def chunk(self, epoch: int, start: int, k: int, pad_to: int | None = None) -> PyTree:
        """Returns the K batches from number `start` on, stacked: leaves `[K, B, ...]`.

        The last batch may be smaller: then K is 1. With `pad_to`, the result has so many rows.
        """
        rows = k if pad_to is None else pad_to
        if self.knows_shapes:
            return self._take(epoch, start, k, rows, self._on_device is not None)
        batches = (self.batch(epoch, index) for index in range(start, start + k))
        return _stack.stack_batches(batches, rows)[0]

    def put_on_device(self, room: int, name: str) -> None:
        """Puts the data on the device, with ``placement="auto"``, if they take that many bytes."""
        if not self._is_decided:
            self._is_decided = True
            self._on_device = OnDevice(self.data) if has_room(self.data, room, name) else None

    def shapes(self, examples: int) -> PyTree:
        """Returns the shapes and dtypes of a batch, before the transform."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), self.data
        )

    def fingerprint(self) -> dict[str, Any]:
        """Returns properties that distinguish these batches from others, for a resumed run."""
        specs = {path: _tree.strong_spec(x) for path, x in _tree.leaves_with_path(self.shapes(1))}
        return {"data": "ArrayLoader", **self._settings(), "batch": specs}

    def summary(self) -> Summary:
        """Returns the spec and a few numbers of each leaf."""
        return summary(self.data)

    def _take(self, epoch: int, start: int, k: int, pad_to: int, on_device: bool) -> PyTree:
        """Copies the examples of K adjacent batches, all at once, from the device or the host."""
        first = start * self.batch_size
        stop = min(first + k * self.batch_size, self.examples)
        rows = self.order(epoch)[first:stop] if self._makes_own_order else np.arange(first, stop)
        rows = rows.reshape(k, min(self.batch_size, stop - first))
        if on_device:
            assert self._on_device is not None
            return self._on_device.take(rows, pad_to)
        # Always a copy, even of adjacent rows: the user may change `data` while a device reads.
        if self._makes_own_order:
            examples = jax.tree.map(lambda x: _stack.take_padded(x, rows, pad_to), self.data)
        else:
            adjacent = jax.tree.map(
                lambda x: x[first:stop].reshape(*rows.shape, *x.shape[1:]), self.data
            )
            examples = jax.tree.map(lambda x: _stack.copy_padded(x, pad_to), adjacent)
        if self._checks_chunks:
            require_integers_fit(examples, "data")
        return examples


def _common_length(data: PyTree) -> int:
    """Returns the number of examples.

    Raises:
      ValueError: There are none, or leaves have different lengths.
    """
    lengths = {len(x) if x.ndim else 0 for x in jax.tree.leaves(data)}
    if len(lengths) != 1 or 0 in lengths:
        leaves = _tree.format_leaves(data) or "none"
        raise ValueError(
            "data: expected arrays of one length, the number of examples, which is at least 1, got"
            f"\n{leaves}\nFor several inputs pass a tuple or dict of arrays, not a list of "
            "examples."
        )
    return lengths.pop()
