"""The events of a run."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._checks import require_no_problems
from functrain.common._gather import fetch_global
from functrain.common._log_values import name_of, to_floats
from functrain.common._types import PyTree
from functrain.data._batches import Chunk
from functrain.engine._position import Position


@dataclasses.dataclass(eq=False, kw_only=True)
class Event:
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
      stopped: True if `stop` was called, at this event or within the epoch that it ends.

    Examples:
      >>> event = Event(position=Position(step=3), state=())
      >>> event.step, event.epoch
      (3, 0)
    """

    position: Position
    state: PyTree = dataclasses.field(repr=False)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: dict[str, np.ndarray | str] = dataclasses.field(default_factory=dict, repr=False)
    stopped: bool = False
    # A function: most events are handled without computing the metrics.
    _metrics: Callable[[], dict[str, Any]] = dataclasses.field(default=dict, repr=False)
    # True for a population: values and logs then have one number per member.
    _of_members: bool = dataclasses.field(default=False, repr=False)
    # See `hand_over`.
    _is_handed_over: bool = dataclasses.field(default=False, repr=False)

    def __post_init__(self) -> None:
        # The attribute is made when it is read: most events are handled without their states, and
        # flattening a large one takes a few percent of a short step.
        self._original_state = self.__dict__.pop("state")

    def __getattr__(self, name: str) -> Any:
        if name != "state":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # In containers of its own: those of the run do not change if a leaf is assigned in place.
        self.state = jax.tree.map(lambda x: x, self._original_state)
        return self.state

    @property
    def step(self) -> int:
        """Steps taken since the training began."""
        return self.position.step

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        return self.position.epoch

    def hand_over(self, state: PyTree) -> None:
        """Assigns a state whose arrays are used nowhere else, so that the run need not copy it.

        Args:
          state: A state with the structure, shapes and dtypes of `event.state`.
        """
        self.state, self._is_handed_over = state, True

    def original_state(self) -> PyTree:
        """Returns the state that the event came with, also if another was assigned since."""
        return self._original_state

    def new_state(self) -> PyTree | None:
        """Returns the state to continue with, if another or a leaf of it was assigned; else None.

        Raises:
          ValueError: Its structure, shapes or dtypes are not those that it had.
        """
        if "state" not in self.__dict__:
            return None
        state, original = self.state, self._original_state
        has_structure = _tree.structure(state) == _tree.structure(original)
        # By identity: the values need not be ready, and a comparison would wait for them.
        leaves, original_leaves = jax.tree.leaves(state), jax.tree.leaves(original)
        if has_structure and all(map(operator.is_, leaves, original_leaves)):
            return None
        # The next program consumes the state, and only `hand_over` promises that nothing else uses
        # its arrays.
        if self._is_handed_over:
            return state
        # Before the comparison: copies of NumPy arrays and Python numbers are jax arrays.
        state = _tree.copy(state) if has_structure else state
        require_no_problems(
            "event.state",
            _tree.differences(original, state),
            "a state with the structure, shapes and dtypes it had",
            "Assign a state with all of its leaves: event.state = new_state.",
        )
        return state

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


EventT = TypeVar("EventT", bound=Event)


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
    # True if the arrays of a batch do not tell how many examples it has, and batches differ.
    _has_equal_weight: bool = dataclasses.field(default=False, repr=False)
    # An array that is ready when the program has run, and the names of the logs by their structure,
    # which the events of a run share.
    _done: PyTree = dataclasses.field(default=(), repr=False)
    _log_names: dict[Any, list[tuple[int, str]]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    _host_logs: dict[str, np.ndarray] | None = dataclasses.field(
        default=None, init=False, repr=False
    )

    @property
    def logs(self) -> PyTree:
        """The logs of each step: every leaf `[steps, ...]`, on the device."""
        return jax.tree.map(lambda x: x if len(x) == self.steps else x[: self.steps], self.rows)

    def host_logs(self) -> dict[str, np.ndarray]:
        """Returns the scalar logs of each step by path, on the host. Waits for the program.

        `[steps]` each, for a population `[steps, N]`. They may be views of the program's outputs:
        copy what you keep. If members are divided over several processes, all of these have to
        call it. The hooks' method `logs` gets an event whose logs have arrived.
        """
        if self._host_logs is None:
            logs = self.scalar_logs()
            if not logs:
                # The end of an epoch, and of the run, is when its programs have run.
                jax.block_until_ready(self._done)
            self._host_logs = fetch_rows(logs, self.steps)
        return self._host_logs

    def latest(self) -> dict[str, Any]:
        """Returns the scalar logs of the last step, for a population `f64[N]` each. Waits."""
        return {name: to_floats(x[-1]) for name, x in self.host_logs().items()}

    def scalar_logs(self) -> dict[str, Any]:
        """Returns the logs that are one real number a step, or member and step, on the device."""
        leaves, structure = jax.tree.flatten(self.rows)
        # Making path strings is slow, and they are the same for every chunk.
        if structure not in self._log_names:
            names = self._log_names[structure] = []
            for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(self.rows)):
                is_real = not (_tree.is_key(x) or jnp.issubdtype(x.dtype, jnp.complexfloating))
                if is_real and x.ndim == (2 if self._of_members else 1):
                    names.append((i, name_of(path)))
        return {name: leaves[i] for i, name in self._log_names[structure]}


def fetch_rows(rows: PyTree, steps: int) -> PyTree:
    """Fetches the rows of the steps that were taken: NumPy arrays `[steps, ...]`. Waits."""
    return jax.tree.map(lambda x: x[:steps], fetch_global(rows))


def row_of_step(rows: PyTree, i: int) -> PyTree:
    """Returns the outputs of the i-th step."""
    return jax.tree.map(lambda x: x[i], rows)


@dataclasses.dataclass(eq=False)
class LateLogs:
    """Passes on the logs of each program when the next one runs, so that nobody waits for them.

    Attributes:
      receivers: Called with the `ChunkEnd` of each chunk, one event late.
      pending: The chunk whose logs have not been passed on.
    """

    receivers: Sequence[Callable[[ChunkEnd], None]]
    pending: ChunkEnd | None = None

    def __call__(self, event: Event | None = None) -> None:
        """Passes on the logs of the chunk before an event. Waits until its program has run."""
        chunk = event if self.receivers and isinstance(event, ChunkEnd) else None
        if chunk is not None:
            for x in chunk.scalar_logs().values():
                # On CPUs the host reads the memory of the device.
                if isinstance(x, jax.Array) and next(iter(x.devices())).platform != "cpu":
                    x.copy_to_host_async()
        # Assigned first: if a receiver raises an error, the next logs are passed on at the end.
        pending, self.pending = self.pending, chunk
        if pending is not None:
            for receive in self.receivers:
                receive(pending)


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
