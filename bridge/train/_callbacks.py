"""Callbacks around chunks of steps: Keras's, users', and the loggers of functrain."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.optim._optimizers import step_counter
from bridge.train._batches import BatchEvents
from functrain import Position
from functrain.events import ChunkEnd, EpochEnd
from functrain.internal import HookRunner, Logger, PyTree, fetch_rows, row_of_step

# The batch methods of each kind of run: those for the begin and the end, then aliases.
_METHODS = {
    "train": ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}

# Keras's own callback that may end training at any batch.
_MAY_END = keras.callbacks.TerminateOnNaN

# The functions of these methods in Keras's own classes.
_KERAS_METHODS = {
    getattr(cls, name, None)
    for cls in vars(keras.callbacks).values()
    if isinstance(cls, type)
    for names in _METHODS.values()
    for name in names
} - {None}

# Keras's own callbacks that write files, and the attributes in which they keep the paths.
_WRITERS = keras.callbacks.CSVLogger, keras.callbacks.ModelCheckpoint, keras.callbacks.TensorBoard
_PATHS = "filename", "filepath", "log_dir"


def flat(callbacks: Any) -> list[Any]:
    """Returns the callbacks of a CallbackList, or of the nested lists that `fit` accepts."""
    leaves = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
    return [callback for callback in leaves if callback is not None]


class BatchCallbacks:
    """The batch methods of a list of callbacks, called for whole chunks.

    There are three kinds of callbacks. The progress bar only shows logs, and gets them one chunk
    late, so that the device never waits for it. Keras's callbacks that act on batches, and users'
    callbacks, are called for each batch after its chunk. All others are not called.

    Args:
      callbacks: Keras's list.
      kind: "train", "test" or "predict".
      quiet: Do not show the progress bar, as Keras does not for an evaluation within `fit`.

    Attributes:
      bars: The progress bars.
      acting: The callbacks that are called at batches, and may change the model.
      fusible: True if "auto" may fuse: no callback might have to act on every step.
    """

    def __init__(self, callbacks: Any, kind: str, *, quiet: bool = False) -> None:
        self._begin_method, self._end_method = _METHODS[kind][:2]
        self._kind = kind
        self.bars: list[Any] = []
        self.acting: list[Any] = []
        self.fusible = True
        # A list of another class may do anything in its methods, so it counts as one callback.
        is_keras_list = type(callbacks) is keras.callbacks.CallbackList
        for callback in callbacks.callbacks if is_keras_list else [callbacks]:
            if type(callback) is keras.callbacks.ProgbarLogger:
                self.bars += [] if quiet else [callback]
            else:
                self._add(callback)
        # The outputs of the steps in one execution of a prediction, which has one batch event.
        self._outputs: list[PyTree] = []

    def _add(self, callback: Any) -> None:
        """Adds a callback if it acts on batches."""
        names = _METHODS[self._kind]
        # None for an attribute that is no plain method.
        functions = {getattr(getattr(callback, name), "__func__", None) for name in names}
        if functions == {getattr(keras.callbacks.Callback, name) for name in names}:
            return
        # A user's method may do anything; what Keras's methods do is known, except for those of a
        # list, which may hold callbacks of any class.
        is_list = isinstance(callback, keras.callbacks.CallbackList)
        is_known = not is_list and functions <= _KERAS_METHODS
        if is_known and keras_private.callbacks.ignores_batches(callback):
            return
        self.acting.append(callback)
        # Users set `chunk_safe` in callbacks that may be called when their chunk is over.
        is_safe = is_known and not isinstance(callback, _MAY_END)
        self.fusible &= is_safe or bool(getattr(callback, "chunk_safe", False))

    def steps_until_action(self) -> int | None:
        """Returns in how many steps a callback next saves or records the model; None if never."""
        # Evaluations and predictions save and record nothing at single batches.
        callbacks = self.acting if self._kind == "train" else []
        counts = map(keras_private.callbacks.batches_until_action, callbacks)
        return min((count for count in counts if count is not None), default=None)

    def begin_batch(self, batch: int | None) -> None:
        """Calls the methods that begin a batch, if Keras has a batch event at this step."""
        if batch is None:
            return
        for callback in self.acting:
            getattr(callback, self._begin_method)(batch, logs={})

    def end_chunk(self, event: ChunkEnd) -> None:
        """Calls the methods for the batches of a chunk; the first one has begun already.

        This waits until the program of the chunk has run.
        """
        rows = fetch_rows(event.rows, event.steps)
        for i, events in enumerate(event.batch_info):
            if i:
                self.begin_batch(events.begin)
            logs = self._logs(row_of_step(rows, i), events)
            if events.end is None:
                continue
            logs = keras_private.trainer.as_floats(logs)
            for callback in self.acting:
                getattr(callback, self._end_method)(events.end, logs=logs)
            # Keras would not have run the rest of the chunk after TerminateOnNaN.
            if any(isinstance(x, _MAY_END) and x.model.stop_training for x in self.acting):
                break

    def show_progress(self, event: ChunkEnd) -> None:
        """Shows the last batch of a chunk that has run."""
        ends = [i for i, events in enumerate(event.batch_info) if events.end is not None]
        if not ends:
            return
        logs = {}
        # The outputs of a prediction are large, and the bar does not show them.
        if self._kind != "predict":
            rows = fetch_rows(event.rows, event.steps)
            logs = keras_private.trainer.as_floats(row_of_step(rows, ends[-1]))
        for bar in self.bars:
            getattr(bar, self._end_method)(event.batch_info[ends[-1]].end, logs=logs)

    def _logs(self, logs: PyTree, events: BatchEvents) -> PyTree:
        """Returns a step's logs; in `predict`, the outputs of all steps since the last end."""
        if self._kind != "predict":
            return logs
        if events.begin is not None:
            self._outputs = []
        self._outputs.append(logs)
        return {"outputs": jax.tree.map(lambda *x: np.concatenate(x), *self._outputs)}


@contextlib.contextmanager
def files_written(callbacks: Any) -> Iterator[None]:
    """Context manager: closes the loggers, and lets only the first process write Keras's files.

    In the other processes Keras's callbacks write to a temporary directory. They cannot be left
    out, since chunks end where callbacks need it, and have to end at the same steps everywhere.
    """
    with contextlib.ExitStack() as undo:
        for callback in flat(callbacks):
            # A fit that fails has to close the files of its loggers, too.
            if isinstance(callback, LoggerCallback):
                undo.callback(callback.close)
            if isinstance(callback, _WRITERS) and jax.process_index() > 0:
                folder = undo.enter_context(tempfile.TemporaryDirectory())
                name = next(filter(vars(callback).__contains__, _PATHS))
                path = getattr(callback, name)
                undo.callback(setattr, callback, name, path)
                setattr(callback, name, os.path.join(folder, os.path.basename(os.fspath(path))))
        yield


def with_loggers(callbacks: Any) -> Any:
    """Returns callbacks with one for all loggers of functrain among them."""
    # A CSVLogger has a trigger, and Keras's callbacks have nothing that would ask it.
    loggers = [x for x in flat(callbacks) if isinstance(x, Logger) and not hasattr(x, "every")]
    if not loggers:
        return callbacks
    return [*(x for x in flat(callbacks) if x not in loggers), LoggerCallback(loggers)]


class LoggerCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """A callback that passes the logs of steps and epochs to loggers of functrain.

    Steps are counted from the optimizer's count, so that a second fit of a model continues the
    axis of the first.

    Args:
      loggers: Loggers of functrain.
    """

    def __init__(self, loggers: list[Logger]) -> None:
        super().__init__()
        self._hooks = HookRunner(loggers)
        self._running = contextlib.ExitStack()
        # Steps that the model had taken when the fit began, and steps of the fit.
        self._steps_before: int | None = None
        self._steps = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the loggers, and notes the first step unless a checkpoint has restored it."""
        if self._steps_before is None:
            optimizer = getattr(self.model, "optimizer", None)
            self._steps_before = 0 if optimizer is None else int(step_counter(optimizer).value)
        self._running.enter_context(self._hooks.running())

    def take(self, event: ChunkEnd) -> None:
        """Logs what the steps of a chunk report."""
        self._steps = event.step
        # Nested logs have their last name only, as in other Keras callbacks.
        rows = {name.rpartition("/")[-1]: x for name, x in event.host_logs().items()}
        position = self._position(event.epoch)
        self._hooks.logs(dataclasses.replace(event, position=position, state=(), rows=rows))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Logs the values of an epoch, including those of its evaluation."""
        self._hooks(EpochEnd(position=self._position(epoch), state=(), values=dict(logs or {})))

    def state(self) -> dict[str, Any]:
        """Returns the state to save."""
        steps = {"steps_before": self._steps_before, "steps": self._steps}
        return {**steps, "loggers": self._hooks.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned. Call it before the fit begins."""
        self._steps_before, self._steps = state["steps_before"], state["steps"]
        self._hooks.restore(state["loggers"])

    def close(self) -> None:
        """Closes the loggers. Call it however the fit ends."""
        self._running.close()

    def _position(self, epoch: int) -> Position:
        assert self._steps_before is not None, "on_train_begin comes first"
        return Position(self._steps_before + self._steps, epoch)
