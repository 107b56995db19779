"""Keras's callbacks, metrics and evaluations, as a hook of a run."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.train._batches import keras_batches
from bridge.train._callbacks import BatchCallbacks, flat, only_read_model_attribute
from bridge.train._compiling import RunningMeans
from bridge.train._loggers import LoggerCallback
from bridge.train._memory import Memory
from bridge.train._model_values import ModelValues
from functrain.events import ChunkEnd, EpochEnd, Event, LogsReady, RunEnd
from functrain.internal import (
    Batches,
    ChunkBegin,
    EpochBegin,
    PyTree,
    Run,
    fetch_rows,
    is_number,
    row_of_step,
)

_STOP = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


class Evaluation:
    """The data that `fit` evaluates on, and the epochs that end with an evaluation.

    Attributes:
      is_iterator: True if each evaluation has the batches that follow those of the last one.
    """

    def __init__(self, model: keras.Model, data: Any, size: Any, steps: Any, freq: Any) -> None:
        self._model, self._freq = model, freq
        data = keras.utils.unpack_x_y_sample_weight(data)
        self.is_iterator = isinstance(data[0], Iterator)
        self._batches = functools.cache(
            lambda: keras_batches(model, data, size, steps, trains=False)
        )

    def is_due(self, epoch: int) -> bool:
        """Returns True if an epoch, counted from 0, ends with an evaluation."""
        if isinstance(self._freq, list):  # of epochs counted from 1
            return epoch + 1 in self._freq
        return bool((epoch + 1) % self._freq == 0)

    def batches(self) -> Batches:
        """Returns the batches, from one iterator for all epochs, as in Keras."""
        batches = self._batches()
        keras_private.trainer.build_from(self._model, batches.data)
        return batches


class KerasHook:
    """Calls Keras's callbacks around the chunks and epochs of a run.

    The run stops where a callback sets `model.stop_training`, `stop_evaluating` or
    `stop_predicting`.

    Args:
      model: The model; built, as is everything that `compile` made.
      kind: "train", "test" or "predict".
      batches: The data of the run.
      callbacks: Keras's list.
      memory: What callbacks remember, for a fit that saves itself.
      is_within_fit: Whether it is an evaluation in the middle of a fit: its progress bar is not
        shown, as in Keras.

    Attributes:
      calls: The batch methods of the callbacks.
      loggers: Loggers of functrain among the callbacks of a fit.
      values: The model's values.
      until_due: A trigger that is due where a callback acts within an epoch.
      is_lazy: True if callbacks look at the model through their attribute `model` only.
      evaluate: Given the number of an epoch, returns the values of the evaluation at its end, or
        None if it has none.
      finalizes: True if the optimizer has the last word on the weights, after a fit.
      logs: The values of the last epoch.
    """

    def __init__(
        self,
        model: keras.Model,
        kind: str,
        batches: Batches,
        callbacks: Any,
        *,
        memory: Memory | None = None,
        is_within_fit: bool = False,
    ) -> None:
        self.model, self.kind, self.batches, self.callbacks = model, kind, batches, callbacks
        self.memory, self.is_within_fit = memory, is_within_fit
        self.calls = BatchCallbacks(callbacks, kind, quiet=is_within_fit)
        self.loggers = [
            x for x in flat(callbacks) if kind == "train" and isinstance(x, LoggerCallback)
        ]
        self.values = ModelValues(model, kind)
        self.until_due = _UntilDue(self)
        self.is_lazy = only_read_model_attribute(callbacks)
        self.evaluate: Callable[[int], dict[str, Any] | None] = lambda epoch: None
        self.finalizes = kind == "train"
        self.logs: dict[str, Any] = {}
        self._means = None if kind == "predict" else RunningMeans.of(model)
        self._last_chunk: ChunkEnd | None = None
        self._reported_before: PyTree = {}  # by the last step before a checkpoint
        self._is_finished = False

    def __call__(self, event: Event) -> None:
        """Calls the callbacks that an event is for."""
        handle: dict[type[Event], Callable[[Any], None]] = {
            EpochBegin: self._begin_epoch,
            ChunkBegin: self._begin_chunk,
            ChunkEnd: self._end_chunk,
            EpochEnd: self._end_epoch,
            RunEnd: self._end_run,
        }
        handle[type(event)](event)

    @property
    def is_stopped(self) -> bool:
        """True if a callback has asked to stop."""
        return bool(getattr(self.model, _STOP[self.kind]))

    def take_logs(self, event: LogsReady) -> None:
        """Hands the logs of a chunk to the loggers."""
        for logger in self.loggers:
            logger.take(event)

    def state(self) -> dict[str, Any]:
        """Returns what to save beside the model's values."""
        assert self.memory is not None, "a fit that saves itself has one"
        return {"memory": self.memory.state(), "reported": self._reported()}

    def restore(self, state: dict[str, Any]) -> None:
        """Notes what `state` returned: callbacks get it back when the first epoch begins."""
        assert self.memory is not None, "a fit that saves itself has one"
        self.memory.restore(state["memory"])
        self._reported_before = state["reported"]

    def finish(self, run: Run) -> bool:
        """Assigns the run's values to the model, however the run has ended.

        If a program failed, the model goes back to the epoch's beginning, or to where a callback
        last saw it.

        Returns:
          True if the model is whole; False if a program failed with the values of a large model,
          of which there is no copy.
        """
        if self._is_finished:
            return True
        whole = None if self.values.are_in_model else run.last_whole()
        is_whole = self.values.are_in_model or whole is not None
        if whole is not None:
            self.values.lend(whole[0])
        self.values.assign()
        if is_whole:
            self._finalize()
        self._is_finished = True
        return is_whole

    def _begin_epoch(self, event: EpochBegin) -> None:
        if self.memory is not None and self.memory.is_pending:
            self.values.put(event.state)
            if event.position.batch:
                # The callbacks began this epoch before the checkpoint: what they do now is undone.
                self.callbacks.on_epoch_begin(event.epoch)
                self.values.put(event.state)
            self.memory.restore_callbacks()
        elif not self.is_lazy:
            self.values.assign()
        if not event.position.batch:
            self._reset_metrics(event)
            if self.kind == "train":
                self.callbacks.on_epoch_begin(event.epoch)
        self.values.take_back(event)

    def _begin_chunk(self, event: ChunkBegin) -> None:
        self.calls.before(event.chunk.marks[0].begin)
        self.values.take_back(event)

    def _end_chunk(self, event: ChunkEnd) -> None:
        self._last_chunk = event
        self.values.lend(event.state)
        self.calls.after(event)
        self.values.take_back(event)
        self._stop(event)

    def _end_epoch(self, event: EpochEnd) -> None:
        if event.stopped:  # by any of the processes
            setattr(self.model, _STOP[self.kind], True)
        self.calls.before(self.batches.data.missing)
        self.calls.flush()
        if self.kind != "predict":
            self.logs = self._epoch_logs(event)
        if self.kind == "train":
            self._end_epoch_of_fit(event)
        self._stop(event)

    def _end_epoch_of_fit(self, event: EpochEnd) -> None:
        if not self.is_lazy:
            self.values.assign()
        evaluated = self.evaluate(event.epoch) or {}
        self.logs.update({f"val_{name}": value for name, value in evaluated.items()})
        self.callbacks.on_epoch_end(event.epoch, self.logs)
        event.values |= {name: float(x) for name, x in self.logs.items() if is_number(x)}
        self.values.show(event)

    def _end_run(self, event: RunEnd) -> None:
        if jax.process_count() > 1:
            setattr(self.model, _STOP[self.kind], event.was_stopped)
        if self.kind != "train":
            return
        if self.memory is not None and self.memory.is_pending:  # no epoch was left
            self.values.put(event.state)
            self.memory.restore_callbacks()
        self.values.assign()
        self._finalize()
        self._is_finished = True
        self.callbacks.on_train_end(logs=self.logs)
        final = self.values.variable_values()
        if self.memory is not None and not _are_same(final, event.state):
            event.hand_over(final)  # saved beside the state that a longer fit continues with

    def _stop(self, event: Event) -> None:
        """Stops the run if a callback has asked for it, and not taken that back since."""
        event.stopped = self.is_stopped
        if jax.process_count() > 1:  # until all of them stop
            setattr(self.model, _STOP[self.kind], False)

    def _finalize(self) -> None:
        """Has the optimizer of a fit put its averages into the weights, as Keras does."""
        if self.finalizes and isinstance(self.model.optimizer, keras.optimizers.Optimizer):
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)

    def _reset_metrics(self, event: Event) -> None:
        """Resets the metrics, wherever their values are."""
        if self.kind == "predict":
            return
        if self._means is None:
            self.values.assign()
            self.model.reset_metrics()
        elif self.values.are_in_model:
            self._means.reset_variables()
        else:
            metrics = self._means.reset(event.state.metrics)
            event.hand_over(event.state.replace(metrics=metrics))
            self.values.lend(event.state)

    def _epoch_logs(self, event: EpochEnd) -> dict[str, Any]:
        """Returns the metrics, or what the last step reported if that is something else.

        Waits for the device, and assigns the model's values if its metrics need that.
        """
        if not event.position.batch:  # data that have run out: as in Keras, nothing new
            return dict(self._reported())
        if self._means is None or self.values.are_in_model:
            self.values.assign()
            return keras_private.trainer.epoch_logs(self.model, self._reported())
        metrics = self._means.read(event.state.metrics)
        rows = {} if self._last_chunk is None else self._last_chunk.rows
        are_metrics = isinstance(rows, dict) and rows.keys() == metrics.keys()
        return dict(jax.device_get(metrics) if are_metrics else self._reported())

    def _reported(self) -> PyTree:
        """Returns what the last step reported."""
        last = self._last_chunk
        if last is None:
            return self._reported_before
        return row_of_step(fetch_rows(last.rows, last.steps), last.steps - 1)


class _UntilDue:
    """A trigger that is due where a callback saves or records within an epoch."""

    def __init__(self, hook: KerasHook) -> None:
        self._hook = hook

    def next_step(self, step: int) -> int | None:
        """Returns the next step at which a chunk has to end."""
        if self._hook.is_stopped and jax.process_count() == 1:
            # Before the first batch: Keras looks after its first program.
            return step + int(self._hook.model.steps_per_execution)
        steps = self._hook.calls.until()
        return None if steps is None else step + steps

    def due(self, step: int, epoch: int | None, seconds: float) -> bool:
        """Returns False: the callbacks themselves know when they are due."""
        return False


def _are_same(a: PyTree, b: PyTree) -> bool:
    """Returns True if two states have the same values; all processes have to call it."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x is y or bool(jnp.array_equal(x, y, equal_nan=True)) for x, y in pairs)
