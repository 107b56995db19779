"""The loop as a generator: it steps, the caller decides what happens in between."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._checks import is_whole
from functrain.common._types import PyTree, Step
from functrain.engine import Fused
from functrain.engine import fuse as fuse_steps
from functrain.engine._feed import Chunk, Feed, FuseArg
from functrain.engine._programs import cached
from functrain.engine._trigger import Trigger
from functrain.metrics._metric import Metered
from functrain.rewrites import Mode
from functrain.step._step import MeteredStep

# How many programs may be under way before the loop waits for the oldest: enough to keep a device
# busy, few enough to bound memory and the time an interrupt takes.
RUN_AHEAD = 2


@dataclasses.dataclass(eq=False)
class Event:
    """Something that happened in a run.

    Attributes:
      epoch: Number of the epoch, from 0.
      step: Steps taken since the run began.
      state: The state after them. The next program consumes it (donation): use it before you
        let the loop go on, and copy what you keep. Assign another one, of the same structure,
        shapes and dtypes, and the run goes on with a copy of that.
      values: What is known of this moment by name, such as ``{"val_loss": 0.3}``. `fit` puts an
        epoch's means and metrics in before its hooks run; what hooks add goes into the history.

    Examples:
      >>> Event(epoch=0, step=3, state=()).step
      3
    """

    epoch: int
    step: int
    state: PyTree
    values: dict[str, float] = dataclasses.field(default_factory=dict, kw_only=True)
    stopped: bool = dataclasses.field(default=False, kw_only=True)
    _metrics: Callable[[], dict[str, Any]] = dataclasses.field(
        default=dict, repr=False, kw_only=True
    )

    def metrics(self) -> dict[str, Any]:
        """Returns the running metrics of the epoch so far, as arrays on the device."""
        return self._metrics()

    def stop(self) -> None:
        """Ends the run after this event; `RunEnd` still comes."""
        self.stopped = True


@dataclasses.dataclass(eq=False)
class ChunkEnd(Event):
    """A program has been dispatched; its results may still be under way.

    Attributes:
      steps: Steps in this chunk, at most K.
      examples: Examples per step.
      rows: The logs as the program returned them: every leaf `[K, ...]`, on the device, with rows
        of zeros where it took fewer steps.

    Examples:
      >>> import jax.numpy as jnp
      >>> rows = {"loss": jnp.array([0.5, 0.25, 0.0])}
      >>> event = ChunkEnd(epoch=0, step=2, state=(), steps=2, examples=32, rows=rows)
      >>> print(event.logs["loss"], event.latest())
      [0.5  0.25] {'loss': 0.25}
    """

    steps: int
    examples: int
    rows: PyTree

    @property
    def logs(self) -> PyTree:
        """What each step reported: every leaf `[steps, ...]`, on the device."""
        return jax.tree.map(lambda x: x if len(x) == self.steps else x[: self.steps], self.rows)

    def latest(self) -> dict[str, float]:
        """Returns the scalars the last step reported. Waits for the device."""
        host = jax.device_get(self.rows)
        return {
            path: float(x[self.steps - 1])
            for path, x in _tree.leaves_with_path(host)
            if x.ndim == 1
        }


@dataclasses.dataclass(eq=False)
class EpochEnd(Event):
    """An epoch is over; `metrics()` are those of the whole epoch.

    Examples:
      >>> EpochEnd(epoch=1, step=20, state=()).metrics()
      {}
    """


@dataclasses.dataclass(eq=False)
class RunEnd(Event):
    """The run is over: all epochs are, or someone called `stop`. Always the last event.

    Examples:
      >>> RunEnd(epoch=1, step=20, state=()).step
      20
    """


def run(
    state: PyTree,
    step: Step[Any],
    data: Any,
    *,
    epochs: int = 1,
    first_epoch: int = 0,
    fuse: FuseArg = "auto",
    boundaries: Iterable[Trigger] = (),
    rewrites: Mode = "auto",
    sharding: jax.sharding.NamedSharding | None = None,
    jit: bool = True,
) -> Iterator[Event]:
    """Yields an event after every program and every epoch: the loop, for those who own theirs.

    Nothing waits for the device but a bound on how far the loop may run ahead: while one program
    computes, the next chunk is made.

    Args:
      state: Any pytree of arrays. Copied once, so the caller's stays alive.
      step: ``(state, batch) -> (state, logs)``, not jitted. One with metrics starts afresh each
        epoch; events carry the bare state.
      data: An `ArrayLoader`, or an iterable of batches (for more than one epoch, one that can be
        iterated again). Batches are pytrees of NumPy or jax arrays, or of tensors that
        `np.asarray` takes; they reach the step in their own dtype, so that bytes can be cast and
        scaled on the device.
      epochs: How many times to go through the data.
      first_epoch: Number of the first one. A loader's order is a function of it: two runs of one
        epoch are one run of two if the second has ``first_epoch=1``.
      fuse: Steps per program, K. ``"auto"`` takes at most 128, and fewer where the epoch is
        short, the state is large or the batches are (8 at the least, if they fit into 64 MiB).
        K batches are in memory at once, two or three times over. Results do not depend on K.
      boundaries: Triggers (`every`, `at`) at whose steps a chunk must end. The same program takes
        fewer steps then: nothing further is compiled.
      rewrites: Which slow operations to rewrite on CPU; see `fuse`.
      sharding: Of one batch, such as ``NamedSharding(mesh, PartitionSpec("data"))``; a chunk's
        leading axis is added. The state keeps the shardings it has.
      jit: False runs every step by itself, uncompiled, for debugging: prints and breakpoints in
        the step see values.

    Yields:
      `ChunkEnd` after every program, `EpochEnd` after every epoch, `RunEnd` at last.

    Raises:
      ValueError: No batches, batches that differ from the first, more epochs than an iterator
        lasts, a `fuse` below 1, or an event was given a state that does not fit.
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
    state = _tree.copy(state)
    size = sum(int(x.nbytes) for x in jax.tree.leaves(state) if not _tree.is_key(x))
    feed = Feed(data, fuse, boundaries=boundaries, sharding=sharding, state_bytes=size)
    for name, value, least in (("epochs", epochs, 1), ("first_epoch", first_epoch, 0)):
        if not is_whole(value, least):
            raise ValueError(f"{name}: expected a whole number from {least} on, got {value!r}")
    if epochs > 1 and feed.one_shot:
        raise ValueError(
            f"data: expected something that can be iterated {epochs} times, got an iterator, "
            "which is exhausted after one pass. Pass a list, an ArrayLoader or a loader object."
        )
    epochs_to_do = range(first_epoch, first_epoch + epochs)
    return _run(_Stepper(step, state, jit, rewrites), feed, epochs_to_do)


def _run(stepper: "_Stepper", feed: Feed, epochs: range) -> Iterator[Event]:
    event, epoch = Event(epochs.start, 0, ()), epochs.start
    for epoch in epochs:
        stepper.begin_epoch()
        for chunk in feed.epoch(epoch, stepper.taken):
            rows = stepper.take(chunk)
            where = stepper.where(epoch)
            event = ChunkEnd(**where, steps=chunk.steps, examples=chunk.examples, rows=rows)
            yield event
            stepper.resume(event.state)
            if event.stopped:
                break
        else:
            event = EpochEnd(**stepper.where(epoch))
            yield event
            stepper.resume(event.state)
        if event.stopped:
            break
    event = RunEnd(epoch, stepper.taken, stepper.state)
    yield event
    stepper.resume(event.state)  # refuses what is no state of this run


class _Stepper:
    """A step, its programs, and the state it has come to."""

    def __init__(self, step: Any, state: PyTree, jit: bool, rewrites: Mode) -> None:
        self._step, self._jit, self._rewrites = step, jit, rewrites
        self._carry = state
        self._fused: dict[int, Fused[Any]] = {}
        self._in_flight: collections.deque[PyTree] = collections.deque()
        self.taken = 0

    @property
    def state(self) -> PyTree:
        """The state, without metrics."""
        return self._carry.state if isinstance(self._carry, Metered) else self._carry

    def begin_epoch(self) -> None:
        """Lets metrics start afresh."""
        if isinstance(self._step, MeteredStep):
            self._carry = self._step.start(self.state)

    def take(self, chunk: Chunk) -> PyTree:
        """Takes a chunk's steps; waits only where too many programs are under way."""
        if self._jit:
            if chunk.k not in self._fused:
                self._fused[chunk.k] = fuse_steps(self._step, chunk.k, rewrites=self._rewrites)
            fused = self._fused[chunk.k]
            self._carry, rows = fused.dispatch(self._carry, chunk.batches, chunk.steps)
        else:
            self._carry, rows = _eager(self._step, self._carry, chunk)
        self.taken += chunk.steps
        # A state is donated to the next program, so only logs can be waited for later.
        self._in_flight.append(rows)
        if not jax.tree.leaves(rows):
            jax.block_until_ready(self._carry)
        if len(self._in_flight) > RUN_AHEAD:
            jax.block_until_ready(self._in_flight.popleft())
        return rows

    def where(self, epoch: int) -> dict[str, Any]:
        """Returns what every event says."""
        known = {"epoch": epoch, "step": self.taken, "state": self.state}
        if not isinstance(self._step, MeteredStep):
            return known
        compute = cached(
            self._step, "metrics", lambda get: jax.jit(lambda m: get().metrics.compute(m))
        )
        metrics = self._carry.metrics
        return {**known, "_metrics": lambda: compute(metrics)}

    def resume(self, state: PyTree) -> None:
        """Goes on with the state an event was left with."""
        if state is self.state:
            return
        changed = _tree.differences(self.state, state)
        if changed:
            raise ValueError(
                "event.state: expected a state of the structure, shapes and dtypes it had, got\n"
                f"{_tree.bullets(changed)}"
            )
        new = _tree.copy(state)
        metered = isinstance(self._carry, Metered)
        self._carry = self._carry.replace(state=new) if metered else new


def _eager(step: Any, carry: PyTree, chunk: Chunk) -> tuple[PyTree, PyTree]:
    """Takes a chunk's steps one by one, uncompiled."""
    logs = []
    with jax.disable_jit():
        for i in range(chunk.steps):
            carry, log = step(carry, jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), chunk.batches))
            logs.append(log)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *logs)
