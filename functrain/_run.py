"""The loop as a generator: it steps, the caller decides what happens in between."""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from functrain import _tree
from functrain._metrics import Metered
from functrain._step import MeteredStep
from functrain._types import PyTree, Step
from functrain.data._feed import Chunk, Feed, FuseArg
from functrain.fusion import fuse as fuse_steps
from functrain.fusion._programs import cached

# How many programs may be under way before the loop waits for the oldest: enough to keep a device
# busy, few enough to bound memory and the time an interrupt takes.
RUN_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened in a run.

    Attributes:
      epoch: Number of the epoch, from 0.
      step: Steps taken since the run began.
      state: The state after them. The next program consumes it (donation): use it before you
        let the loop go on, and copy what you keep.

    Examples:
      >>> Event(epoch=0, step=3, state=()).step
      3
    """

    epoch: int
    step: int
    state: PyTree
    _metrics: Callable[[], dict[str, Any]] = dataclasses.field(
        default=lambda: {}, repr=False, kw_only=True
    )

    def metrics(self) -> dict[str, Any]:
        """Returns the running metrics of the epoch so far, as arrays on the device."""
        return self._metrics()


@dataclasses.dataclass(frozen=True)
class ChunkEnd(Event):
    """A program has been dispatched; its results may still be under way.

    Attributes:
      steps: Steps in this chunk, K.
      examples: Examples per step.
      logs: What each step reported: every leaf `[K, ...]`, on the device.

    Examples:
      >>> event = ChunkEnd(epoch=0, step=2, state=(), steps=2, examples=32, logs={})
      >>> event.steps * event.examples
      64
    """

    steps: int
    examples: int
    logs: PyTree


@dataclasses.dataclass(frozen=True)
class EpochEnd(Event):
    """An epoch is over; `metrics()` are those of the whole epoch.

    Examples:
      >>> EpochEnd(epoch=1, step=20, state=()).metrics()
      {}
    """


def run(
    state: PyTree,
    step: Step[Any],
    data: Any,
    *,
    epochs: int = 1,
    fuse: FuseArg = "auto",
    jit: bool = True,
) -> Iterator[Event]:
    """Yields an event after every program and every epoch: the loop, for those who own theirs.

    Args:
      state: Any pytree of arrays. Copied once, so the caller's stays alive.
      step: ``(state, batch) -> (state, logs)``, not jitted. One with metrics starts afresh each
        epoch; events carry the bare state.
      data: An `ArrayLoader`, or an iterable of batches (for more than one epoch, one that can be
        iterated again). Batches are pytrees of NumPy or jax arrays, or of tensors that
        `np.asarray` takes.
      epochs: How many times to go through the data.
      fuse: Steps per program, K; ``"auto"`` takes up to 32, fewer where the epoch is short or
        the batches are large (64 MiB a chunk). Results do not depend on it.
      jit: False runs every step by itself, uncompiled, for debugging: prints and breakpoints in
        the step see values.

    Yields:
      `ChunkEnd` after every program, `EpochEnd` after every epoch.

    Raises:
      ValueError: No batches, batches that differ from the first, more epochs than an iterator
        lasts, or a `fuse` below 1.
      TypeError: The data is no source of batches, or the step is not as `fuse` wants it.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> from functrain import ArrayLoader
      >>> def step(total, batch):
      ...     return total + jnp.sum(batch), {"total": total}
      >>> loader = ArrayLoader(np.ones(10, np.float32), batch_size=2)
      >>> for event in run(jnp.zeros(()), step, loader, fuse=2):
      ...     match event:
      ...         case ChunkEnd(step=n, state=total):
      ...             print(n, total)
      ...         case EpochEnd(epoch=epoch):
      ...             print("epoch", epoch, "is over")
      2 4.0
      4 8.0
      5 10.0
      epoch 0 is over
    """
    feed = Feed(data, fuse)
    if epochs < 1:
        raise ValueError(f"epochs: expected at least 1, got {epochs}")
    if epochs > 1 and feed.one_shot:
        raise ValueError(
            f"data: expected something that can be iterated {epochs} times, got an iterator, "
            "which is exhausted after one pass. Pass a list, an ArrayLoader or a loader object."
        )
    return _run(_tree.copy(state), step, feed, epochs, jit)


def _run(state: PyTree, step: Any, feed: Feed, epochs: int, jit: bool) -> Iterator[Event]:
    taken = 0
    in_flight: collections.deque[PyTree] = collections.deque()
    for epoch in range(epochs):
        carry = step.start(state) if isinstance(step, MeteredStep) else state
        for chunk in feed.epoch(epoch):
            carry, logs = _advance(step, carry, chunk, jit)
            taken += chunk.steps
            in_flight.append(logs)
            if len(in_flight) > RUN_AHEAD:
                jax.block_until_ready(in_flight.popleft())
            state, metrics = _unwrap(step, carry)
            yield ChunkEnd(epoch, taken, state, chunk.steps, chunk.examples, logs, _metrics=metrics)
        state, metrics = _unwrap(step, carry)
        yield EpochEnd(epoch, taken, state, _metrics=metrics)


def _advance(step: Any, carry: PyTree, chunk: Chunk, jit: bool) -> tuple[PyTree, PyTree]:
    if jit:
        return fuse_steps(step, chunk.steps)(carry, chunk.batches)
    logs = []
    with jax.disable_jit():
        for i in range(chunk.steps):
            carry, log = step(carry, jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), chunk.batches))
            logs.append(log)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *logs)


def _unwrap(step: Any, carry: PyTree) -> tuple[PyTree, Callable[[], dict[str, Any]]]:
    if not isinstance(carry, Metered) or not isinstance(step, MeteredStep):
        return carry, dict
    compute = cached(step, "metrics", lambda get: jax.jit(lambda m: get().metrics.compute(m)))
    return carry.state, lambda: compute(carry.metrics)
