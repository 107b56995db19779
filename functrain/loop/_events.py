"""The events of a run."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from functrain.common import _values
from functrain.common._gather import fetch_global
from functrain.common._types import PyTree
from functrain.data._batches import Chunk
from functrain.engine import _rows
from functrain.engine._position import Position


@dataclasses.dataclass(eq=False, kw_only=True)
class _Positioned:
    """An object with a position in the training."""

    position: Position

    @property
    def step(self) -> int:
        """Steps taken since the training began."""
        return self.position.step

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        return self.position.epoch


@dataclasses.dataclass(eq=False, kw_only=True)
class Event(_Positioned):
    """The base class of the events of a run.

    Attributes:
      position: The progress of the training, counted from its very beginning.
      state: The state at that position. The next program consumes it (donation): use it before
        the loop continues, and copy what you keep. If you assign another state with the same
        structure, shapes and dtypes, or a leaf of a dict or list in it, the run continues with a
        copy.
      values: The values of this event by name, such as ``{"val_loss": 0.3}``; for a population
        one per member, `f64[N]`. `fit` adds an epoch's means and metrics before its hooks run;
        values that hooks add go into the history.
      samples: Pictures, `u8[H, W, C]`, and texts of this event by name, for the loggers among the
        later hooks; `functrain.hooks.Sample` adds them.

    Examples:
      >>> event = Event(position=Position(step=3), state=())
      >>> event.step, event.epoch
      (3, 0)
    """

    state: PyTree = dataclasses.field(repr=False)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: dict[str, np.ndarray | str] = dataclasses.field(default_factory=dict, repr=False)
    stopped: bool = False
    # A function: most events are handled without computing the metrics.
    _metrics: Callable[[], dict[str, Any]] = dataclasses.field(default=dict, repr=False)
    # True for a population: values and logs then have one number per member.
    _of_members: bool = dataclasses.field(default=False, repr=False)
    # The latest state that was assigned, and the one that the event came with. Once that has been
    # read, its structure and its leaves.
    _state: PyTree = dataclasses.field(init=False, repr=False)
    _given: PyTree = dataclasses.field(init=False, repr=False)
    _flat: tuple[Any, list[Any]] | None = dataclasses.field(default=None, init=False, repr=False)
    # See `hand_over`.
    _is_handed_over: bool = dataclasses.field(default=False, repr=False)

    def hand_over(self, state: PyTree) -> None:
        """Assigns a state whose arrays are used nowhere else, so that the run need not copy it.

        Args:
          state: A state with the structure, shapes and dtypes of `event.state`.
        """
        self.state, self._is_handed_over = state, True

    def original_state(self) -> PyTree:
        """Returns the state that the event came with, also if a leaf was assigned since."""
        return self._given if self._flat is None else jax.tree.unflatten(*self._flat)

    def is_changed_in_place(self) -> bool:
        """Returns True if a leaf was assigned in a container of the state that the event had."""
        if self._flat is None:
            return False
        structure, leaves = self._flat
        leaves_now, structure_now = jax.tree.flatten(self._given)
        # By identity: the values need not be ready, and a comparison would wait for them.
        is_same = structure_now == structure and all(map(operator.is_, leaves, leaves_now))
        return not is_same

    def metrics(self) -> dict[str, Any]:
        """Returns the running metrics of the epoch so far, as arrays on the device."""
        return self._metrics()

    def stop(self) -> None:
        """Ends the run after this event; `RunEnd` still follows.

        After the last program of an epoch, `EpochEnd` follows as well, if the data have a length.
        Otherwise the epoch is unfinished: it is not evaluated and not in `history.epochs`.

        If several processes share the run and only some of them call it, all stop at one event
        that they agree on, a few programs later.
        """
        self.stopped = True


def _read_state(event: Event) -> PyTree:
    # Containers can be changed once they are known to the reader. Most events are handled without
    # their states, and flattening a large one takes a few percent of a short step.
    if event._flat is None:
        leaves, structure = jax.tree.flatten(event._given)
        event._flat = structure, leaves
    return event._state


def _assign_state(event: Event, state: PyTree) -> None:
    event._state = state
    # The first assignment is that of `__init__`.
    if not hasattr(event, "_given"):
        event._given = state


# Assigned here, since the decorator would take a property in the class for the field's default.
Event.state = property(_read_state, _assign_state)


@dataclasses.dataclass(eq=False, kw_only=True)
class EpochBegin(Event):
    """An epoch is about to begin, at the batch of its position. `run` does not yield this event."""


@dataclasses.dataclass(eq=False, kw_only=True)
class ChunkBegin(Event):
    """A program is about to be dispatched for a chunk. `run` does not yield this event.

    Attributes:
      chunk: The chunk, without its arrays.
    """

    chunk: Chunk


@dataclasses.dataclass(eq=False, kw_only=True)
class ChunkEnd(Event):
    """A program has been dispatched; its results may not be ready yet.

    Attributes:
      steps: Steps in this chunk, at most K.
      examples: Examples per step; 1 if the arrays of a batch do not tell how many it has.
      rows: The logs as the program returned them: every leaf `[K, ...]`, on the device, with rows
        of zeros after the last step.
      batch_info: Additional information about each batch; None for most data.

    Examples:
      >>> import jax.numpy as jnp
      >>> rows = {"loss": jnp.array([0.5, 0.25, 0.0])}
      >>> event = ChunkEnd(position=Position(step=2), state=(), steps=2, examples=32, rows=rows)
      >>> print(event.logs["loss"], event.latest())
      [0.5  0.25] {'loss': 0.25}
    """

    steps: int
    examples: int
    rows: PyTree = dataclasses.field(repr=False)
    batch_info: Any = dataclasses.field(default=None, repr=False)

    @property
    def logs(self) -> PyTree:
        """The logs of each step: every leaf `[steps, ...]`, on the device."""
        return _rows.take_rows(self.rows, self.steps)

    def latest(self) -> dict[str, Any]:
        """Returns the scalar logs of the last step, for a population `f64[N]` each. Waits.

        If members are divided over several processes, all of these have to call it.
        """
        leaves = jax.tree.leaves(self.rows)
        logs = {name: leaves[i] for i, name in _rows.scalar_logs(self.rows, self._of_members)}
        # One call for all logs: it starts every copy before it waits for the first.
        host_logs = fetch_global(logs)
        return {path: _values.to_floats(x[self.steps - 1]) for path, x in host_logs.items()}


@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class LogsReady(_Positioned):
    """The logs of a chunk, on the host, one chunk late: the loop does not wait for the device.

    This event is for histories, progress bars and log files. It has no state; see the `ChunkEnd`
    with the same position, which came before it.

    Attributes:
      position: The position at the end of the chunk.
      steps: Steps in the chunk.
      examples: Examples per step; 1 if the arrays of a batch do not tell how many it has.
      logs: The scalar logs of each step by path: `[steps]` each, for a population `[steps, N]`.
        They are views of the program's outputs: copy what you keep.

    Examples:
      >>> logs = {"loss": np.array([0.5, 0.25])}
      >>> event = LogsReady(position=Position(step=12), steps=2, examples=32, logs=logs)
      >>> list(event.rows())
      [(11, {'loss': 0.5}), (12, {'loss': 0.25})]
    """

    steps: int
    examples: int
    logs: dict[str, np.ndarray]

    def __repr__(self) -> str:
        """Shows the names of the logs without their values."""
        at = f"position={self.position}, steps={self.steps}, examples={self.examples}"
        return f"LogsReady({at}, logs of {', '.join(self.logs) or 'nothing'})"

    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        """Returns the number and the logs of each step."""
        # The position is that of the last step.
        first = self.step - self.steps + 1
        rows = []
        for i in range(self.steps):
            values = {name: _values.to_floats(x[i]) for name, x in self.logs.items()}
            rows.append((first + i, values))
        return rows


@dataclasses.dataclass(eq=False, kw_only=True)
class EpochEnd(Event):
    """An epoch is over; `metrics()` are those of the whole epoch.

    The position is still that of the epoch that has ended, after all of its batches. The first
    chunk of the next epoch has been made already if the data are a loader: a change of the loader's
    arrays in place reaches that epoch from its second chunk on.

    Examples:
      >>> EpochEnd(position=Position(step=20, epoch=1, batch=10), state=()).metrics()
      {}
    """


@dataclasses.dataclass(eq=False, kw_only=True)
class RunEnd(Event):
    """The run is over, after all epochs or a call of `stop`. Always the last event.

    Attributes:
      was_stopped: True if `stop` was called.

    Examples:
      >>> RunEnd(position=Position(step=20, epoch=1, batch=10), state=()).step
      20
    """

    was_stopped: bool = False
