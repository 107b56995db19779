"""Turns any source of batches into chunks that a fused program takes."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._checks import is_whole
from functrain.common._types import PyTree
from functrain.data import _buffer
from functrain.data._batch import batch_size
from functrain.data._loader import ArrayLoader
from functrain.engine._plan import auto_steps
from functrain.engine._trigger import Trigger, steps_until_due

FuseArg: TypeAlias = int | Literal["auto"]


class Chunk(NamedTuple):
    """Stacked batches, of which the first `steps` are to be used."""

    batches: PyTree  # every leaf [k, examples, ...]
    k: int
    steps: int
    examples: int


class Feed:
    """Yields the chunks of an epoch: K batches each, not all of them used where fewer are left.

    A chunk ends where a trigger is due. Only the last batch of an epoch may be smaller; it makes
    a chunk of its own. So there are two shapes at the most, and a run needs no third program.

    Nothing is reused: every chunk is made of fresh memory, since a device may still be reading
    the one before. Making it overlaps with the device's work, because dispatch does not wait.
    """

    def __init__(
        self,
        data: Any,
        fuse: FuseArg,
        *,
        boundaries: Iterable[Trigger] = (),
        sharding: jax.sharding.NamedSharding | None = None,
        state_bytes: int = 0,
    ) -> None:
        if fuse != "auto" and not is_whole(fuse, 1):
            raise ValueError(f"fuse: expected 'auto' or a whole number of steps, got {fuse!r}")
        if not isinstance(data, ArrayLoader):
            _check_iterable(data)
        self._data = data
        self._fuse = fuse
        self._boundaries = tuple(boundaries)
        self._place = _placement(sharding)
        self._state_bytes = state_bytes
        self._first: PyTree = None  # specs of the first batch; every other one must fit it
        self._k: int | None = None

    @property
    def one_shot(self) -> bool:
        """Whether the source is an iterator, gone after one pass."""
        return isinstance(self._data, Iterator)

    def epoch(self, epoch: int, step: int = 0) -> Iterator[Chunk]:
        """Yields the chunks of one epoch, which begins after `step` steps of the run."""
        if isinstance(self._data, ArrayLoader):
            chunks = self._seek(self._data, epoch, step)
        else:
            chunks = self._group(iter(self._data), epoch, step)
        return (chunk._replace(batches=self._place(chunk.batches)) for chunk in chunks)

    def _seek(self, loader: ArrayLoader, epoch: int, step: int) -> Iterator[Chunk]:
        k = self._steps(loader.batch(epoch, 0))
        full = loader.full_batches
        at = 0
        while at < full:
            steps = min(full - at, self._room(step + at, k))
            batches = loader.chunk(epoch, at, steps)
            yield Chunk(filled(batches, k, steps), k, steps, loader.batch_size)
            at += steps
        for index in range(full, len(loader)):
            yield _single(loader.batch(epoch, index))

    def _group(self, batches: Iterator[PyTree], epoch: int, step: int) -> Iterator[Chunk]:
        first = next(batches, None)
        if first is None:
            raise ValueError(
                f"data: expected at least one batch in epoch {epoch}, got none. An iterator or "
                "generator is exhausted after one pass: pass something that can be iterated again."
            )
        k = self._steps(_to_arrays(first))
        size = batch_size(self._first)
        pending: list[PyTree] = []
        ragged: PyTree = None
        for index, raw in enumerate(itertools.chain([first], batches)):
            if ragged is not None:
                raise ValueError(_RAGGED.format(epoch=epoch, step=index - 1))
            batch = _to_arrays(raw)
            if not self._fits(batch, epoch, index):
                ragged = batch
                continue
            pending.append(batch)
            if len(pending) == self._room(step + index + 1 - len(pending), k):
                yield Chunk(stacked(pending, k), k, len(pending), size)
                pending = []
        if pending:
            yield Chunk(stacked(pending, k), k, len(pending), size)
        if ragged is not None:
            yield _single(ragged)

    def _room(self, step: int, k: int) -> int:
        """Steps to take from here: K, or fewer where something is due."""
        until = steps_until_due(self._boundaries, step)
        return k if until is None else min(k, until)

    def _steps(self, batch: PyTree) -> int:
        """Settles K at the first batch."""
        if self._k is None:
            self._first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
            if self._fuse == "auto":
                full = getattr(self._data, "full_batches", None) or steps_per_epoch(self._data)
                stretches = [full, steps_until_due(self._boundaries, 0)]
                self._k = auto_steps(_nbytes(batch), self._state_bytes, stretches)
            else:
                self._k = int(self._fuse)
        return self._k

    def _fits(self, batch: PyTree, epoch: int, index: int) -> bool:
        """Whether a batch is as the first was; False if only smaller, an error otherwise."""
        if _tree.structure(batch) == _tree.structure(self._first):
            pairs = list(zip(jax.tree.leaves(batch), jax.tree.leaves(self._first), strict=True))
            if all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs):
                return True
            if all(_smaller(a, b) and a.dtype == b.dtype for a, b in pairs):
                return False
        raise ValueError(
            f"data: expected every batch like the first, got another at step {index} of epoch "
            f"{epoch}:\n{_tree.bullets(_tree.differences(self._first, batch))}\n"
            "Only the last batch of an epoch may be smaller. The state passed in is unchanged."
        )


def steps_per_epoch(data: Any) -> int | None:
    """Returns the steps per epoch, or None where the source does not know."""
    try:
        return len(data)
    except TypeError:
        return None


_RAGGED = (
    "data: expected only the last batch to be smaller, but batches follow the smaller one at step "
    "{step} of epoch {epoch}. Each new size would compile a program: drop the remainder, or pad "
    "to one size. The state passed in is unchanged."
)


def _placement(sharding: jax.sharding.NamedSharding | None) -> Callable[[PyTree], PyTree]:
    """Returns what puts a chunk on the devices: a batch's sharding, with K in front."""
    if sharding is None:
        return lambda batches: batches
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    chunked = jax.sharding.NamedSharding(sharding.mesh, spec)

    def place(batches: PyTree) -> PyTree:
        try:
            return jax.device_put(batches, chunked)
        except ValueError as error:
            found = [f"{p}: {_tree.spec(x)}" for p, x in _tree.leaves_with_path(batches)]
            raise ValueError(
                f"sharding: expected batches that divide over {sharding.spec} of {sharding.mesh}, "
                f"got a chunk of\n{_tree.bullets(found)}\nTake a batch size that the devices "
                "divide, and drop_remainder=True."
            ) from error

    return place


def _nbytes(batch: PyTree) -> int:
    return sum(int(x.nbytes) for x in jax.tree.leaves(batch))


def _smaller(a: Any, b: Any) -> bool:
    return bool(a.shape[1:] == b.shape[1:] and a.shape[:1] <= b.shape[:1])


def _check_iterable(data: Any) -> None:
    arrays = isinstance(data, dict | np.ndarray | jax.Array | str | bytes) or (
        isinstance(data, tuple) and any(hasattr(x, "shape") for x in data)
    )
    if inspect.isgeneratorfunction(data):
        raise TypeError(
            f"data: expected an iterable of batches, got the generator function {data.__name__}, "
            f"which is not one until it is called: {data.__name__}(). For more than one epoch "
            "pass an object whose __iter__ it is."
        )
    if arrays or not isinstance(data, Iterable):
        raise TypeError(
            f"data: expected an ArrayLoader or an iterable of batches, got {type(data).__name__}. "
            "For arrays: functrain.ArrayLoader((x, y), batch_size)."
        )


def _to_arrays(batch: PyTree) -> PyTree:
    """Takes tensors of other libraries as NumPy; jax arrays stay where they are.

    Copies: a source may fill one buffer again and again, and a chunk holds many batches.
    """

    def array(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return x
        return np.array(x.numpy() if hasattr(x, "numpy") else x)

    return jax.tree.map(array, batch)


def stacked(batches: list[PyTree], k: int) -> PyTree:
    """Stacks up to K batches, and fills up with zeros, which no step will see."""

    def stack(*leaves: Any) -> Any:
        if not isinstance(leaves[0], jax.Array):
            return _buffer.stack(leaves, k)
        return _fill(jnp.stack(leaves), k)

    return jax.tree.map(stack, *batches)


def filled(batches: PyTree, k: int, steps: int) -> PyTree:
    """Fills batches that are stacked up to K."""
    if steps == k:
        return batches
    return jax.tree.map(
        lambda x: _fill(x, k) if isinstance(x, jax.Array) else _buffer.stack(x, k), batches
    )


def _fill(x: jax.Array, k: int) -> jax.Array:
    return jnp.concatenate([x, jnp.zeros((k - len(x), *x.shape[1:]), x.dtype)])


def _single(batch: PyTree) -> Chunk:
    return Chunk(jax.tree.map(lambda x: x[None], batch), 1, 1, batch_size(batch))
