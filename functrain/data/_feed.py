"""Turns any source of batches into chunks that a fused program takes."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from functrain import _tree
from functrain._metrics import batch_size
from functrain._types import PyTree
from functrain.data._loader import ArrayLoader

FuseArg: TypeAlias = int | Literal["auto"]

AUTO_STEPS = 32
AUTO_BYTES = 64 * 2**20


class Chunk(NamedTuple):
    """Stacked batches: `steps` of them, each of `examples` examples."""

    batches: PyTree  # every leaf [steps, examples, ...]
    steps: int
    examples: int


class Feed:
    """Yields the chunks of an epoch: K steps at a time, what is left over one by one.

    K and one are the only sizes, and only the last batch of an epoch may be smaller, so that a
    run needs three programs at the most.
    """

    def __init__(self, data: Any, fuse: FuseArg) -> None:
        if fuse != "auto" and (not isinstance(fuse, int) or fuse < 1):
            raise ValueError(f"fuse: expected 'auto' or at least 1 step, got {fuse!r}")
        if not isinstance(data, ArrayLoader):
            _check_iterable(data)
        self._data = data
        self._fuse = fuse
        self._first: PyTree = None  # specs of the first batch; every other one must fit it
        self._k: int | None = None

    @property
    def one_shot(self) -> bool:
        """Whether the source is an iterator, gone after one pass."""
        return not isinstance(self._data, ArrayLoader) and iter(self._data) is self._data

    def epoch(self, epoch: int) -> Iterator[Chunk]:
        """Yields the chunks of one epoch."""
        if isinstance(self._data, ArrayLoader):
            return self._seek(self._data, epoch)
        return self._group(iter(self._data), epoch)

    def _seek(self, loader: ArrayLoader, epoch: int) -> Iterator[Chunk]:
        k = self._steps(loader.batch(epoch, 0))
        full = loader.full_batches
        at = 0
        while at < full:
            steps = k if at + k <= full else 1
            yield Chunk(loader.chunk(epoch, at, steps), steps, loader.batch_size)
            at += steps
        for index in range(full, len(loader)):
            yield _single(loader.batch(epoch, index))

    def _group(self, batches: Iterator[PyTree], epoch: int) -> Iterator[Chunk]:
        first = next(batches, None)
        if first is None:
            raise ValueError(
                f"data: expected at least one batch in epoch {epoch}, got none. An iterator or "
                "generator is exhausted after one pass: pass something that can be iterated again."
            )
        k = self._steps(_to_arrays(first))
        pending: list[PyTree] = []
        ragged: int | None = None
        for index, raw in enumerate(itertools.chain([first], batches)):
            batch = _to_arrays(raw)
            if ragged is not None:
                raise ValueError(_RAGGED.format(epoch=epoch, step=ragged))
            if not self._fits(batch, epoch, index):
                ragged = index
                yield from map(_single, pending)
                pending = []
                yield _single(batch)
                continue
            pending.append(batch)
            if len(pending) == k:
                yield Chunk(_stack(pending), k, batch_size(batch))
                pending = []
        yield from map(_single, pending)

    def _steps(self, batch: PyTree) -> int:
        """Settles K at the first batch."""
        if self._k is None:
            self._first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
            self._k = (
                _auto(batch, steps_per_epoch(self._data)) if self._fuse == "auto" else self._fuse
            )
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


def _smaller(a: Any, b: Any) -> bool:
    return bool(a.shape[1:] == b.shape[1:] and a.shape[:1] <= b.shape[:1])


def _auto(batch: PyTree, steps: int | None) -> int:
    """A cheap rule: as many steps as fit into an epoch and a modest buffer, 32 at the most."""
    size = max(1, sum(int(x.nbytes) for x in jax.tree.leaves(batch)))
    return max(1, min(AUTO_STEPS, AUTO_BYTES // size, steps or AUTO_STEPS))


def _check_iterable(data: Any) -> None:
    arrays = isinstance(data, dict | np.ndarray | jax.Array) or (
        isinstance(data, tuple) and any(hasattr(x, "shape") for x in data)
    )
    if arrays or not isinstance(data, Iterable):
        raise TypeError(
            f"data: expected an ArrayLoader or an iterable of batches, got {type(data).__name__}. "
            "For arrays: functrain.ArrayLoader((x, y), batch_size)."
        )


def _to_arrays(batch: PyTree) -> PyTree:
    """Takes tensors of other libraries as NumPy; jax arrays stay where they are."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), batch)


def _stack(batches: list[PyTree]) -> PyTree:
    def stack(*leaves: Any) -> Any:
        return (jnp if isinstance(leaves[0], jax.Array) else np).stack(leaves)

    return jax.tree.map(stack, *batches)


def _single(batch: PyTree) -> Chunk:
    return Chunk(jax.tree.map(lambda x: x[None], batch), 1, batch_size(batch))
