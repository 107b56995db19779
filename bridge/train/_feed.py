"""Batches of whatever `fit` takes as data, as a pass that functrain's engine stacks."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge._randomness import put_randomness
from functrain.internal import (
    Local,
    LocalPass,
    Made,
    PyTree,
    Stack,
    StreamPass,
    chunk_placement,
    filled,
    is_cheap_to_read,
    require_integers_fit,
)


class Mark(NamedTuple):
    """Which batch events Keras has around a step: one pair for each steps_per_execution steps."""

    begin: int | None
    end: int | None


class Rows(NamedTuple):
    """A batch that has not been taken from its arrays yet."""

    source: keras_private.data.ArrayBatches
    index: Any
    spec: Any  # tells batches apart which cannot be stacked
    mark: Mark | None = None

    def arrays(self) -> PyTree:
        """Returns the batch."""
        return self.source.take(self.index)

    def stack(self, items: Iterator["Rows"], k: int) -> Stack:
        """Takes all rows of a chunk at once; rows next to one another are not copied."""
        found = list(items)
        n, indices = len(found), [item.index for item in found]
        whole: Any
        if isinstance(self.index, slice):
            whole = slice(self.index.start, indices[-1].stop)
        else:
            whole = np.concatenate(indices)
        taken = self.source.take(whole)
        require_integers_fit(taken, "data")
        stacked = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), taken)
        return Stack(filled(stacked, k, n), n, 0, [item.mark for item in found])


class Missing(NamedTuple):
    """A batch that Keras begins, to find that there is none."""

    mark: Mark
    spec: Any = "missing"

    def arrays(self) -> PyTree:
        """Returns nothing."""
        return None

    def stack(self, items: Iterator["Missing"], k: int) -> Stack:
        """Returns the mark alone: there is never another."""
        return Stack(None, 0, 0, [item.mark for item in items])


def source(
    model: keras.Model, data: Any, batch_size: Any, steps: Any, *, trains: bool, **more: Any
) -> Any:
    """Returns Keras's EpochIterator over the batches of whatever `fit` takes.

    Args:
      model: The model, for its `steps_per_execution`.
      data: x, y and sample_weight; all but the first may be None. Of `Local`, each process has
        its part of all three.
      batch_size: Examples per step, or None.
      steps: Steps per epoch, or None.
      trains: Whether the devices have to divide every batch.
      **more: shuffle and class_weight.

    Raises:
      ValueError: What Keras raises, there is no batch at all, or an array holds integers that jax
        would cut to 32 bits.
    """
    x, y, sample_weight = data
    local = x if isinstance(x, Local) else None
    x = x.data if isinstance(x, Local) else x
    for name, part in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        require_integers_fit(keras.tree.map_structure(_if_read_now, part), name)
    found = keras_private.data.epochs(
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
    if trains:
        _require_divisible(found.data_adapter, 1 if local is None else local.processes)
    found.local = local
    return found


def _if_read_now(x: Any) -> Any:
    """Returns an array in memory, and None for what is looked at chunk by chunk."""
    return x if isinstance(x, np.ndarray) and is_cheap_to_read(x) else None


def _require_divisible(adapter: Any, parts: int) -> None:
    """Refuses batches of arrays that the devices of `keras.distribution` do not divide."""
    distribution = keras.distribution.distribution()
    if distribution is None or keras_private.data.array_batches(adapter) is None:
        return
    for what, own in (("", adapter.batch_size), ("last ", adapter.partial_batch_size)):
        if size := (own or 0) * parts:
            where = distribution.get_data_layout((size,)).backend_layout
            try:
                where.shard_shape((size,))
            except ValueError as error:
                raise ValueError(
                    f"x: expected batches that divide over {where.spec} of the mesh "
                    f"{dict(where.mesh.shape)}, got a {what}batch of {size}. Take another "
                    "batch_size, or leave some examples out. The model is unchanged."
                ) from error


def _shapes(x: Any) -> str:
    shapes = [str(tuple(leaf.shape)) for leaf in keras.tree.flatten(x) if hasattr(leaf, "shape")]
    return f"of shape {', '.join(shapes)}" if shapes else "of length 0"


def passes(adapter: Any) -> Callable[[], Iterator[Any]]:
    """Returns a function that begins a pass over the batches of a data adapter."""
    arrays = keras_private.data.array_batches(adapter)
    if arrays is None:
        return lambda: map(Made.of, adapter.get_jax_iterator())
    return lambda: (Rows(arrays, rows, size) for rows, size in arrays)


class Resume(NamedTuple):
    """Where an epoch goes on.

    Attributes:
      batch: Batches that were taken.
      ahead: Batches that were fetched beyond those.
      first: Randomness when its first batch was fetched.
      now: Randomness afterwards.
      reported: What the last of the batches that were taken reported.
    """

    batch: int
    ahead: int
    first: Any
    now: Any
    reported: PyTree


def epoch(epochs: Any, resume: Resume | None = None) -> StreamPass | LocalPass:
    """Begins the next epoch of what `source` returned, or goes on in it.

    The last batch may be a missing one: Keras begins a batch, and finds that there is none.

    Raises:
      ValueError: There are fewer batches than were taken.
    """
    items = _marked(epochs)
    own = StreamPass(items if resume is None else _rest(items, resume))
    return own if epochs.local is None else LocalPass(own, epochs.local, "x")


def _rest(items: Iterator[Any], resume: Resume) -> Iterator[Any]:
    """Leaves out the batches that were taken."""
    if resume.first is not None:
        put_randomness(resume.first)
    left_out = sum(1 for _ in itertools.islice(items, resume.batch))
    if left_out < resume.batch:
        raise ValueError(
            f"x: expected the {resume.batch} batches of the epoch that were taken before the "
            f"checkpoint, got {left_out}. The data are not those that were saved."
        )
    ahead = list(itertools.islice(items, resume.ahead))
    put_randomness(resume.now)
    return itertools.chain(ahead, items)


def _marked(epochs: Any) -> Iterator[Any]:
    """Yields every batch with its mark."""
    with epochs.catch_stop_iteration():
        for begin, end, iterator in epochs:
            group: list[Any] = []
            for _ in range(epochs.steps_per_execution):
                item = next(iterator, None)
                if item is None:
                    break
                group.append(item)
            last = len(group) - 1
            for i, item in enumerate(group):
                yield item._replace(mark=Mark(None if i else begin, end if i == last else None))
            if not group:
                yield Missing(Mark(begin, None))
                raise StopIteration  # which Keras's own warning waits for


def placement(*, trains: bool) -> Callable[[PyTree], PyTree]:
    """Returns what puts stacked batches where `keras.distribution` wants them.

    Over several processes each of them has the same batches, and takes its own devices' part.
    Outside of training, all devices get the whole of a batch that they do not divide.
    """
    distribution = keras.distribution.distribution()
    places: dict[Any, Callable[[PyTree], PyTree]] = {}

    def put(x: Any) -> Any:
        where = distribution.get_data_layout(x.shape[1:]).backend_layout
        place = chunk_placement(where, replicates=not trains)
        return places.setdefault(where.spec, place)(x)

    return lambda batches: batches if distribution is None else jax.tree.map(put, batches)
