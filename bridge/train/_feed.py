"""Batches of whatever `fit` takes as data, stacked for programs of K steps."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from bridge import keras_private
from functrain.internal import PyTree, filled, stacked
from functrain.internal import tree as _tree


class Mark(NamedTuple):
    """Which batch events Keras has around a step: one pair for each steps_per_execution steps."""

    begin: int | None
    end: int | None


class Chunk(NamedTuple):
    """Stacked batches, of which the first so many as there are marks are to be used."""

    batches: PyTree  # every leaf [k, batch, ...]; one batch as it is where k is 0
    k: int
    marks: list[Mark]

    @property
    def steps(self) -> int:
        """Steps to take."""
        return len(self.marks)


class _Rows(NamedTuple):
    """A batch that has not been taken from its arrays yet."""

    source: keras_private.ArrayBatches
    index: Any
    spec: Any  # tells batches apart which cannot be stacked

    def take(self) -> PyTree:
        """Returns the batch."""
        return self.source.take(self.index)


class _Made(NamedTuple):
    """A batch that its source made."""

    batch: PyTree
    spec: Any

    def take(self) -> PyTree:
        """Returns the batch."""
        return self.batch


def source(model: keras.Model, data: Any, batch_size: Any, steps: Any, **more: Any) -> Any:
    """Returns Keras's EpochIterator over the batches of whatever `fit` takes.

    Args:
      model: The model, for its `steps_per_execution`.
      data: x, y and sample_weight; all but the first may be None.
      batch_size: Examples per step, or None.
      steps: Steps per epoch, or None.
      **more: shuffle and class_weight.

    Raises:
      ValueError: What Keras raises, or there is no batch at all.
    """
    x, y, sample_weight = data
    found = keras_private.epochs(
        passes,
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps,
        steps_per_execution=model.steps_per_execution,
        **{"shuffle": False, **more},
    )
    if found.num_batches == 0:
        raise ValueError(
            f"x: expected at least one batch, got {type(x).__name__} without any "
            f"({_shapes(x)}). The model is unchanged."
        )
    return found


def _shapes(x: Any) -> str:
    shapes = [str(tuple(leaf.shape)) for leaf in keras.tree.flatten(x) if hasattr(leaf, "shape")]
    return f"of shape {', '.join(shapes)}" if shapes else "of length 0"


def passes(adapter: Any) -> Callable[[], Iterator[Any]]:
    """Returns a function that begins a pass over the batches of a data adapter."""
    arrays = keras_private.array_batches(adapter)
    if arrays is None:
        return lambda: (_Made(_own(batch), _spec(batch)) for batch in adapter.get_jax_iterator())
    return lambda: (_Rows(arrays, rows, size) for rows, size in arrays)


def _own(batch: PyTree) -> PyTree:
    """Copies a batch: its source may fill one buffer again and again, and a chunk holds many."""
    return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, batch)


def _spec(batch: PyTree) -> Any:
    shapes = [(np.shape(x), getattr(x, "dtype", None)) for x in jax.tree.leaves(batch)]
    return _tree.structure(batch), shapes


class Feed:
    """Yields the chunks of an epoch.

    All batches like the first are stacked, up to K of them; any other goes alone. So a smaller
    last batch costs one more program, not one for each number of steps.

    Args:
      epochs: What `source` returned.
      choose: Called with the first batch, returns K; 0 for batches as they are, not stacked.
      until: Returns how many steps from now a chunk must end; None for no such bound.
    """

    def __init__(
        self,
        epochs: Any,
        choose: Callable[[PyTree], int],
        until: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.epochs = epochs
        self._choose = choose
        self._until = until
        self._k: int | None = None
        self._first: Any = None

    def epoch(self) -> Iterator[Chunk]:
        """Yields the chunks of the next epoch.

        The last may have a mark and no steps: Keras begins a batch, and finds that there is none.
        """
        pending: list[tuple[Any, Mark]] = []
        room = 1
        failure: Exception | None = None
        steps = self._steps()
        while True:
            try:
                item, mark = next(steps)
            except StopIteration:
                break
            except Exception as error:  # what came before it was good, and is used
                failure = error
                break
            if item is None:
                if pending:
                    yield self._stack(pending)
                pending = []
                yield Chunk(None, 0, [mark])
                continue
            alike = self._settle(item)
            if pending and not alike:
                yield self._stack(pending)
                pending = []
            if not pending:
                room = self._room() if alike else 1
            pending.append((item, mark))
            if len(pending) >= room:
                yield self._stack(pending)
                pending = []
        if pending:
            yield self._stack(pending)
        if failure is not None:
            raise failure

    def _steps(self) -> Iterator[tuple[Any, Mark]]:
        """Yields every batch with its mark; a None where Keras begins one that is not there."""
        with self.epochs.catch_stop_iteration():
            for begin, end, iterator in self.epochs:
                group: list[Any] = []
                for _ in range(self.epochs.steps_per_execution):
                    item = next(iterator, None)
                    if item is None:
                        break
                    group.append(item)
                last = len(group) - 1
                for i, item in enumerate(group):
                    yield item, Mark(None if i else begin, end if i == last else None)
                if not group:
                    yield None, Mark(begin, None)
                    raise StopIteration  # which Keras's own warning waits for

    def _settle(self, item: Any) -> bool:
        """Whether a batch is like the first; the first settles K."""
        if self._k is None:
            self._k, self._first = self._choose(item.take()), item.spec
        return bool(item.spec == self._first)

    def _room(self) -> int:
        until = self._until()
        most = max(1, self._k or 0)
        return most if until is None else min(most, until)

    def _stack(self, pending: list[tuple[Any, Mark]]) -> Chunk:
        items, marks = [item for item, _ in pending], [mark for _, mark in pending]
        if self._k == 0:
            return Chunk(place(items[0].take(), stacked=False), 0, marks)
        k = self._k if items[0].spec == self._first else 1
        assert k is not None
        if isinstance(items[0], _Rows):
            batches = filled(_take(items), k, len(items))
        else:
            batches = stacked([item.batch for item in items], k)
        return Chunk(place(batches), k, marks)


def _take(items: list[_Rows]) -> PyTree:
    """Takes all rows of a chunk at once; rows next to one another are not copied."""
    indices = [item.index for item in items]
    whole: Any
    if isinstance(indices[0], slice):
        whole = slice(indices[0].start, indices[-1].stop)
    else:
        whole = np.concatenate(indices)
    n = len(items)
    taken = items[0].source.take(whole)
    return jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), taken)


def place(batches: PyTree, *, stacked: bool = True) -> PyTree:
    """Puts batches where `keras.distribution` wants them.

    Raises:
      NotImplementedError: The distribution spans several processes.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return batches
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"expected keras.distribution within one process, got {jax.process_count()} processes. "
            "Use model.fit, or bridge.train_step with functrain.run and arrays you shard yourself."
        )

    def put(x: Any) -> jax.Array:
        layout = distribution.get_data_layout(x.shape[stacked:]).backend_layout
        spec = jax.sharding.PartitionSpec(*[None] * stacked, *layout.spec)
        placed: jax.Array = jax.device_put(x, jax.sharding.NamedSharding(layout.mesh, spec))
        return placed

    return jax.tree.map(put, batches)
