"""What happens in a run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from functrain.common import _tree, _values
from functrain.common._types import PyTree
from functrain.data._batches import Chunk
from functrain.engine import _rows
from functrain.engine._position import Position


@dataclasses.dataclass(eq=False, kw_only=True)
class _Placed:
    """What has a position in the training."""

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
class Event(_Placed):
    """Something that happened in a run.

    Attributes:
      position: How far the training has come, counted from its very beginning.
      state: The state after that. The next program consumes it (donation): use it before you
        let the loop go on, and copy what you keep. Assign another one, of the same structure,
        shapes and dtypes, and the run goes on with a copy of that.
      values: What is known of this moment by name, such as ``{"val_loss": 0.3}``; of a population
        one for each member, `f64[N]`. `fit` puts an epoch's means and metrics in before its hooks
        run; what hooks add goes into the history.
      samples: Pictures, `u8[H, W, C]`, and texts of this moment by name, for the loggers among the
        hooks to come; `functrain.hooks.Sample` puts them there.

    Examples:
      >>> event = Event(position=Position(step=3), state=())
      >>> event.step, event.epoch
      (3, 0)
    """

    state: PyTree = dataclasses.field(repr=False)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: dict[str, np.ndarray | str] = dataclasses.field(default_factory=dict, repr=False)
    stopped: bool = False
    _metrics: Callable[[], dict[str, Any]] = dataclasses.field(default=dict, repr=False)
    _of_members: bool = dataclasses.field(default=False, repr=False)  # of a population
    _is_handed_over: bool = dataclasses.field(default=False, repr=False)
    _spare: PyTree = dataclasses.field(default=None, repr=False)

    def hand_over(self, state: PyTree, spare: PyTree = None) -> None:
        """Assigns a state whose arrays nobody else uses: the run continues without copying it.

        Args:
          state: Of the structure, shapes and dtypes of `event.state`.
          spare: An equal state that stays as it is, to go back to if a program fails.
        """
        self.state, self._is_handed_over, self._spare = state, True, spare

    def metrics(self) -> dict[str, Any]:
        """Returns the running metrics of the epoch so far, as arrays on the device."""
        return self._metrics()

    def stop(self) -> None:
        """Ends the run after this event; `RunEnd` still comes.

        Where several processes share the run and only some of them call it, all stop at one event
        that they agree on, a few programs later.
        """
        self.stopped = True


@dataclasses.dataclass(eq=False, kw_only=True)
class EpochBegin(Event):
    """An epoch is about to begin, at the batch that its position says. `run` does not yield it."""


@dataclasses.dataclass(eq=False, kw_only=True)
class ChunkBegin(Event):
    """A chunk is ready, and its program is about to be dispatched. `run` does not yield it.

    Attributes:
      chunk: The chunk, without its arrays.
    """

    chunk: Chunk


@dataclasses.dataclass(eq=False, kw_only=True)
class ChunkEnd(Event):
    """A program has been dispatched; its results may still be under way.

    Attributes:
      steps: Steps in this chunk, at most K.
      examples: Examples per step.
      rows: The logs as the program returned them: every leaf `[K, ...]`, on the device, with rows
        of zeros where it took fewer steps.
      marks: What else the data say of each step; None for most.

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
    marks: Any = dataclasses.field(default=None, repr=False)

    @property
    def logs(self) -> PyTree:
        """What each step reported: every leaf `[steps, ...]`, on the device."""
        return _rows.take_rows(self.rows, self.steps)

    def latest(self) -> dict[str, Any]:
        """Returns the scalars the last step reported, of a population `f64[N]` each. Waits."""
        rows = _tree.leaves_with_path(self.rows)
        found = {path: x for path, x in rows if _rows.is_scalar_per_step(x, self._of_members)}
        fetched = jax.device_get(found)
        return {path: _values.to_floats(x[self.steps - 1]) for path, x in fetched.items()}


@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class LogsReady(_Placed):
    """The logs of a chunk, on the host, one chunk late: the loop does not wait for the device.

    For whoever writes: history, progress, files. It has no state; that is in the `ChunkEnd` of
    the same position, which came before it.

    Attributes:
      position: At the end of the chunk.
      steps: Steps in it.
      examples: Examples per step.
      logs: The numbers each step reported, `[steps]` each, of a population `[steps, N]`, under
        their paths. They are views of what the program returned: copy what you keep.

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
        """Names the logs; their numbers are many."""
        at = f"position={self.position}, steps={self.steps}, examples={self.examples}"
        return f"LogsReady({at}, logs of {', '.join(self.logs) or 'nothing'})"

    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        """Returns for each step its number and what it reported."""
        first = self.step - self.steps + 1
        return [
            (first + i, {name: _values.to_floats(x[i]) for name, x in self.logs.items()})
            for i in range(self.steps)
        ]


@dataclasses.dataclass(eq=False, kw_only=True)
class EpochEnd(Event):
    """An epoch is over; `metrics()` are those of the whole epoch.

    The position is still within it: its number, and all of its batches.

    Examples:
      >>> EpochEnd(position=Position(step=20, epoch=1, batch=10), state=()).metrics()
      {}
    """


@dataclasses.dataclass(eq=False, kw_only=True)
class RunEnd(Event):
    """The run is over: all epochs are, or someone called `stop`. Always the last event.

    Attributes:
      was_stopped: True if someone called `stop`.

    Examples:
      >>> RunEnd(position=Position(step=20, epoch=1, batch=10), state=()).step
      20
    """

    was_stopped: bool = False
