"""Keras callbacks around chunks of steps: who is called, with what, and when."""

import contextlib
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.train._batches import Mark
from bridge.train._loggers import LoggerCallback
from functrain.events import ChunkEnd
from functrain.internal import PyTree, fetch_rows, row_of_step

_METHODS = {
    "train": ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


# They read the model as `self.model` only, since none of them runs a function of the user's.
_READ_MODEL_ATTRIBUTE = {
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TerminateOnNaN,
    LoggerCallback,
}


# Not those of CallbackList: a list may hold callbacks of any class.
_KERAS_METHODS = {
    method
    for cls in vars(keras.callbacks).values()
    if isinstance(cls, type) and cls is not keras.callbacks.CallbackList
    for method in vars(cls).values()
    if isinstance(method, types.FunctionType)
}


# Attributes in which Keras's own callbacks have the path that they write to.
_FILES = {
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.TensorBoard: "log_dir",
}


def flat(callbacks: Any) -> list[Any]:
    """Returns the callbacks of Keras's list, or of whatever `fit` takes for one."""
    leaves = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
    return [callback for callback in leaves if callback is not None]


class BatchCallbacks:
    """The batch methods of a list of callbacks, called for whole chunks.

    Three kinds: the progress bar, which only shows logs and gets them one chunk late, so that the
    device never waits for it; Keras's own callbacks that act on batches, and users', which get
    them when their chunk is over; and all others, which are not called.

    Args:
      callbacks: Keras's list.
      kind: "train", "test" or "predict".
      quiet: Leave the progress bar out, as Keras does for an evaluation in the middle of `fit`.
    """

    def __init__(self, callbacks: Any, kind: str, *, quiet: bool = False) -> None:
        self._begin, self._end = _METHODS[kind][:2]
        self._kind = kind
        self._bars: list[Any] = []
        self._acting: list[Any] = []
        # A list of another class may do anything: it counts as one callback.
        own = type(callbacks) is keras.callbacks.CallbackList
        for callback in callbacks.callbacks if own else [callbacks]:
            if type(callback) is keras.callbacks.ProgbarLogger:
                self._bars += [] if quiet else [callback]
            elif self._acts(callback):
                self._acting.append(callback)
        self._outputs: list[PyTree] = []
        self._late: ChunkEnd | None = None

    def _acts(self, callback: Any) -> bool:
        if not any(_overrides(callback, name) for name in _METHODS[self._kind]):
            return False
        if _acts_as_keras_does(callback, self._kind):
            return not keras_private.callbacks.ignores_batches(callback)
        return True

    @property
    def fusible(self) -> bool:
        """Whether "auto" may fuse: no callback is there that might have to act on every step."""
        return all(
            getattr(callback, "chunk_safe", False)
            or (_acts_as_keras_does(callback, self._kind) and not _ends_batches(callback))
            for callback in self._acting
        )

    def until(self) -> int | None:
        """Returns how many steps from now the model is saved or recorded, if it is by steps."""
        return self._least(keras_private.callbacks.batches_until_action)

    def between(self) -> int | None:
        """Returns how many steps there are from one such step to the next."""
        return self._least(keras_private.callbacks.action_interval)

    def _least(self, steps: Callable[[Any], int | None]) -> int | None:
        found = map(steps, self._acting if self._kind == "train" else [])
        return min((n for n in found if n is not None), default=None)

    def before(self, batch: int | None) -> None:
        """Calls the methods that begin a batch, before its chunk is run."""
        self._call(self._begin, batch, None)

    def after(self, event: ChunkEnd) -> None:
        """Calls the methods that end batches, when the program of their chunk was dispatched."""
        if self._acting:
            self._replay(event.marks, fetch_rows(event.rows, event.steps))
        if self._bars:
            self.flush()
            self._late = event

    def flush(self) -> None:
        """Brings the progress bar up to date."""
        event, self._late = self._late, None
        if event is None:
            return
        ends = [i for i, mark in enumerate(event.marks) if mark.end is not None]
        if ends:
            last = ends[-1]
            rows = None if self._kind == "predict" else fetch_rows(event.rows, event.steps)
            logs = None if rows is None else row_of_step(rows, last)
            for bar in self._bars:
                getattr(bar, self._end)(
                    event.marks[last].end, logs=keras_private.callbacks.as_floats(logs)
                )

    def _replay(self, marks: list[Mark], rows: PyTree) -> None:
        for i, mark in enumerate(marks):
            if i:
                self._call(self._begin, mark.begin, None)
            logs = self._logs(row_of_step(rows, i), mark)
            self._call(self._end, mark.end, logs)
            if mark.end is not None and self._is_the_end(logs):
                break

    def _is_the_end(self, logs: PyTree) -> bool:
        """Whether TerminateOnNaN ended training with this batch: none of the rest is reported."""
        if self._kind != "train" or not any(map(_ends_batches, self._acting)):
            return False
        loss = keras_private.callbacks.as_floats(logs).get("loss")
        return loss is not None and not np.isfinite(loss)

    def _logs(self, logs: PyTree, mark: Mark) -> PyTree:
        """Returns a step's logs; in `predict`, the outputs of all steps since the last end."""
        if self._kind != "predict":
            return logs
        if mark.begin is not None:
            self._outputs = []
        self._outputs.append(logs)
        return {"outputs": jax.tree.map(lambda *x: np.concatenate(x), *self._outputs)}

    def _call(self, method: str, batch: int | None, logs: PyTree) -> None:
        """Calls a method of all, if Keras has an event here."""
        if batch is None:
            return
        logs = keras_private.callbacks.as_floats(logs)
        for callback in self._acting:
            if isinstance(callback, keras.callbacks.LambdaCallback):
                _ = callback.model  # functions reach the model by themselves: bring it up to date
            getattr(callback, method)(batch, logs=logs)


def only_read_model_attribute(callbacks: Any) -> bool:
    """Whether all callbacks reach the model through their attribute `model` only.

    Reading it brings the model up to date; so there is no need to, where nobody reads it.
    """
    own = type(callbacks) is keras.callbacks.CallbackList
    return own and all(type(callback) in _READ_MODEL_ATTRIBUTE for callback in callbacks.callbacks)


@contextlib.contextmanager
def without_history_reading_model(callbacks: Any, model: keras.Model) -> Iterator[None]:
    """Keeps `History` from reading its attribute `model`, which it does after each epoch.

    It only puts itself into `model.history`, where it is already. The model would be brought up
    to date without need, and its values copied again for the next epoch.
    """
    found = [x for x in callbacks.callbacks if type(x) is keras.callbacks.History]
    for history in found:
        history.set_model(types.SimpleNamespace())
    try:
        yield
    finally:
        for history in found:
            history.set_model(model)
            model.history = history


@contextlib.contextmanager
def files_of_the_first(callbacks: Any) -> Iterator[None]:
    """Context manager: lets Keras's own callbacks write in the first process only.

    Those of the other processes are not left out, but write where it is thrown away: chunks end
    where callbacks want it, the same in all processes.
    """
    if jax.process_index() == 0:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        for i, callback in enumerate(flat(callbacks)):
            for kind, name in _FILES.items():
                if isinstance(callback, kind):
                    before = getattr(callback, name)
                    undo.callback(setattr, callback, name, before)
                    new = os.path.join(folder, str(i), os.path.basename(os.fspath(before)))
                    os.makedirs(os.path.dirname(new))
                    setattr(callback, name, new)
        yield


def _ends_batches(callback: Any) -> bool:
    """Whether a callback of Keras's may end training at any batch."""
    return isinstance(callback, keras.callbacks.TerminateOnNaN)


def _overrides(callback: Any, method: str) -> bool:
    """Whether a callback has its own version of a method of `keras.callbacks.Callback`."""
    return _function(callback, method) is not getattr(keras.callbacks.Callback, method)


def _acts_as_keras_does(callback: Any, kind: str) -> bool:
    """Whether all batch methods are those of classes in `keras.callbacks`."""
    return all(_function(callback, method) in _KERAS_METHODS for method in _METHODS[kind])


def _function(callback: Any, method: str) -> Any:
    return getattr(getattr(callback, method), "__func__", None)
