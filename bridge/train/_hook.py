"""A hook that runs Keras's callbacks, metrics and evaluations around a run."""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.train._batches import keras_batches
from bridge.train._callbacks import BatchCallbacks, only_read_model_attribute
from bridge.train._compiling import RunningMeans
from bridge.train._loggers import loggers_among
from bridge.train._memory import Memory
from bridge.train._model_values import ModelValues
from functrain.events import ChunkEnd, EpochEnd, Event, LogsReady, RunEnd
from functrain.internal import (
    Batches,
    ChunkBegin,
    EpochBegin,
    PyTree,
    Run,
    copy_arrays,
    fetch_rows,
    is_number,
    row_of_step,
)

# The attribute of a model by which callbacks stop each kind of run.
_STOP = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


class Evaluation:
    """The data that `fit` evaluates on, and the epochs that end with an evaluation.

    Attributes:
      is_iterator: True if each evaluation has the batches that follow those of the previous one.
    """

    def __init__(self, model: keras.Model, data: Any, size: Any, steps: Any, freq: Any) -> None:
        self._model, self._freq = model, freq
        data = keras.utils.unpack_x_y_sample_weight(data)
        self.is_iterator = isinstance(data[0], Iterator)
        # As in Keras, one iterator is made at the first evaluation and serves all of them.
        self._batches = functools.cache(
            lambda: keras_batches(model, data, size, steps, trains=False)
        )

    def is_due(self, epoch: int) -> bool:
        """Returns True if an epoch, counted from 0, ends with an evaluation."""
        # A list counts epochs from 1.
        if isinstance(self._freq, list):
            return epoch + 1 in self._freq
        return bool((epoch + 1) % self._freq == 0)

    def batches(self) -> Batches:
        """Returns the batches, from one iterator for all epochs, as in Keras."""
        batches = self._batches()
        keras_private.trainer.build_from(self._model, batches.data)
        return batches


class KerasHook:
    """Calls Keras's callbacks around the chunks and epochs of a run.

    The run stops if a callback sets `model.stop_training`, `stop_evaluating` or
    `stop_predicting`. The hook is also a trigger: chunks end where a callback acts on the model.

    Args:
      model: The model; it and all that `compile` made are built.
      kind: "train", "test" or "predict".
      batches: The data of the run.
      callbacks: Keras's list.
      memory: The states of callbacks, for a fit with a checkpointer.
      quiet: Do not show the progress bar.

    Attributes:
      calls: The batch methods of the callbacks.
      loggers: Loggers of functrain among the callbacks of a fit.
      values: The model's values.
      is_lazy: True if callbacks read the model only through their attribute `model`.
      is_evaluation_due: Given the number of an epoch, returns True if it ends with an evaluation.
      evaluate: Evaluates, and returns the values.
      finalizes: True if the optimizer may overwrite the weights with its averages after the run.
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
        quiet: bool = False,
    ) -> None:
        self.model, self.kind, self.batches, self.callbacks = model, kind, batches, callbacks
        self.memory = memory
        self.calls = BatchCallbacks(callbacks, kind, quiet=quiet)
        # The evaluations of a fit share its callbacks, and the fit alone passes logs to loggers.
        self.loggers = loggers_among(callbacks) if kind == "train" else []
        self.values = ModelValues(model, kind)
        self.is_lazy = only_read_model_attribute(callbacks)
        self.is_evaluation_due: Callable[[int], bool] = lambda epoch: False
        self.evaluate: Callable[[], dict[str, Any]] = dict
        self.finalizes = kind == "train"
        self.logs: dict[str, Any] = {}
        # None if Keras itself resets and reads the metrics: see `RunningMeans.of`.
        self._running_means = None if kind == "predict" else RunningMeans.of(model)
        self._last_chunk: ChunkEnd | None = None
        # The steps taken since the end of an execution, of `steps_per_execution` steps.
        self._steps_in_execution = 0
        # The logs of the last step before the checkpoint from which the run resumed.
        self._logs_before: PyTree = {}
        # During an evaluation, what `state` returned before the end of the epoch.
        self._state_before_end: dict[str, Any] | None = None
        self._is_finished = False

    def __call__(self, event: Event) -> None:
        """Calls the callbacks that an event concerns."""
        handlers: dict[type[Event], Callable[[Any], None]] = {
            EpochBegin: self._begin_epoch,
            ChunkBegin: self._begin_chunk,
            ChunkEnd: self._end_chunk,
            EpochEnd: self._end_epoch,
            RunEnd: self._end_run,
        }
        handlers[type(event)](event)

    @property
    def is_stopped(self) -> bool:
        """True if a callback has stopped the run. Callbacks may also take that back."""
        return bool(getattr(self.model, _STOP[self.kind]))

    @is_stopped.setter
    def is_stopped(self, value: bool) -> None:
        setattr(self.model, _STOP[self.kind], value)

    def begin(self) -> None:
        """Calls the callbacks that begin a run."""
        self.is_stopped = False
        getattr(self.callbacks, f"on_{self.kind}_begin")()

    def next_step(self, step: int) -> int | None:
        """Returns the next step at which a chunk has to end; None if no callback needs that."""
        execution = int(self.model.steps_per_execution)
        if self.is_stopped and jax.process_count() == 1:
            # A callback stopped the run before the first batch. Keras checks that only after its
            # first program, of `steps_per_execution` steps.
            return step + execution
        steps = self.calls.steps_until_action()
        if self._steps_in_execution and not self.calls.fusible:
            # A chunk has ended within an execution, as for a save. The next one ends with it.
            steps = 1
        # Callbacks act at the ends of executions only, and have counted up to the last one.
        last_end = step - self._steps_in_execution
        return None if steps is None else last_end + math.ceil(steps / execution) * execution

    def due(self, step: int, epoch: int | None, seconds: float) -> bool:
        """Returns False: the callbacks are called for every chunk, and act when they are due."""
        return False

    def take_logs(self, event: LogsReady) -> None:
        """Passes the logs of a chunk to the loggers."""
        for logger in self.loggers:
            logger.take(event)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores beside the model's values."""
        assert self.memory is not None, "a fit with a checkpointer has one"
        if self._state_before_end is not None:
            return self._state_before_end
        return {
            "memory": self.memory.state(),
            "reported": self._last_logs(),
            "logs": keras_private.callbacks.as_floats(self.logs),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Keeps what `state` returned. Callbacks are restored when the first epoch begins."""
        assert self.memory is not None, "a fit with a checkpointer has one"
        self.memory.restore(state["memory"])
        self._logs_before, self.logs = state["reported"], state["logs"]

    def finish(self, run: Run) -> bool:
        """Assigns the run's values to the model, however the run has ended.

        Returns:
          True if the model is whole; False if a program failed, which had consumed the values.
        """
        if self._is_finished:
            return True
        last_complete_state = None if self.values.are_in_model else run.last_complete_state()
        is_whole = self.values.are_in_model or last_complete_state is not None
        if last_complete_state is not None:
            self.values.lend(last_complete_state[0])
        self.values.assign()
        if is_whole:
            self._finalize()
        self._is_finished = True
        return is_whole

    def _begin_epoch(self, event: EpochBegin) -> None:
        self._steps_in_execution = event.position.batch % int(self.model.steps_per_execution)
        if self.memory is not None and self.memory.is_pending:
            if event.position.batch:
                # The callbacks began this epoch before the checkpoint was written. They have to
                # begin it again, and the changes that they make to the model are undone.
                self.values.put(event.state)
                self._give_copy_to_callbacks()
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
        self.calls.begin_batch(event.chunk.batch_info[0].begin)
        # As in Keras, weights that a callback sets when a batch begins are those of its step.
        self.values.take_back(event)

    def _end_chunk(self, event: ChunkEnd) -> None:
        self._last_chunk = event
        for events in event.batch_info:
            self._steps_in_execution = self._steps_in_execution + 1 if events.end is None else 0
        # Callbacks that read the model now see the values at the end of the chunk.
        self.values.lend(event.state)
        self.calls.end_chunk(event)
        self.values.take_back(event)
        self._stop_if_asked(event)

    def _end_epoch(self, event: EpochEnd) -> None:
        # Another process may have stopped the run.
        if event.stopped:
            self.is_stopped = True
        # A signal in the evaluation saves the fit as it was before the end of the epoch. Callbacks
        # may change their states in place until then.
        if self.memory is not None and self.is_evaluation_due(event.epoch):
            self._state_before_end = copy.deepcopy(self.state())
        # Keras begins a batch before it finds out that the data have run out.
        self.calls.begin_batch(self.batches.data.missing)
        self.calls.update_progress_bars()
        if self.kind != "predict":
            self.logs = self._epoch_logs(event)
        if self.kind == "train":
            self._end_training_epoch(event)
        self._stop_if_asked(event)

    def _end_training_epoch(self, event: EpochEnd) -> None:
        # The values are assigned when a callback reads its attribute `model`. A callback with its
        # own reference to the model would see old values.
        if not self.is_lazy:
            self.values.assign()
        evaluated = self.evaluate() if self.is_evaluation_due(event.epoch) else {}
        self._state_before_end = None
        self.logs.update({f"val_{name}": value for name, value in evaluated.items()})
        self.callbacks.on_epoch_end(event.epoch, self.logs)
        # The checkpointer chooses the best epoch by these values.
        event.values |= {name: float(x) for name, x in self.logs.items() if is_number(x)}
        self.values.hand_over(event)

    def _end_run(self, event: RunEnd) -> None:
        if jax.process_count() > 1:
            self.is_stopped = event.was_stopped
        if self.kind != "train":
            return
        # A resumed fit that has no epoch left has not restored its callbacks yet.
        if self.memory is not None and self.memory.is_pending:
            self.values.put(event.state)
            self.memory.restore_callbacks()
        self.values.assign()
        if self.memory is not None:
            self._give_copy_to_callbacks()
        self._finalize()
        self._is_finished = True
        self.callbacks.on_train_end(logs=self.logs)
        final = self.values.variable_values()
        # The final values are saved beside the state from which a longer fit continues.
        if self.memory is not None and not _have_equal_values(final, event.state):
            event.hand_over(final)

    def _give_copy_to_callbacks(self) -> None:
        """Assigns copies of the model's arrays to it, if callbacks may evaluate or predict.

        Keras donates the model's arrays then, and the run needs its own to continue or to save.
        """
        # Callbacks may differ between processes, which have to run the same programs.
        if not self.is_lazy or jax.process_count() > 1:
            self.values.put(copy_arrays(self.values.variable_values()))

    def _stop_if_asked(self, event: Event) -> None:
        """Stops the run if a callback has asked for it, and not taken that back since."""
        event.stopped = self.is_stopped
        # Several processes run until all of them have agreed to stop.
        if jax.process_count() > 1:
            self.is_stopped = False

    def _finalize(self) -> None:
        """Overwrites the weights with the optimizer's averages after a fit, as Keras does."""
        if self.finalizes and isinstance(self.model.optimizer, keras.optimizers.Optimizer):
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)

    def _reset_metrics(self, event: Event) -> None:
        """Resets the metrics before an epoch, where they are: in the model or the run's state."""
        if self.kind == "predict":
            return
        if self._running_means is None:
            # Keras's own reset needs the metrics in the model's variables.
            self.values.assign()
            self.model.reset_metrics()
        elif self.values.are_in_model:
            self._running_means.reset_variables()
        else:
            metrics = self._running_means.reset(event.state.metrics)
            event.hand_over(event.state.replace(metrics=metrics))
            self.values.lend(event.state)

    def _epoch_logs(self, event: EpochEnd) -> dict[str, Any]:
        """Returns the metrics, or the logs of the last step if these have other names.

        Waits for the device, and assigns the model's values if its metrics need that.
        """
        # If the data ran out before the epoch, Keras repeats the logs of the last step.
        if not event.position.batch:
            return dict(self._last_logs())
        if self._running_means is None or self.values.are_in_model:
            self.values.assign()
            return keras_private.trainer.epoch_logs(self.model, self._last_logs())
        # The metrics are read from the run's state: assigning all values to the model, only to take
        # them back in the next epoch, would copy them.
        metrics = self._running_means.read(event.state.metrics)
        rows = {} if self._last_chunk is None else self._last_chunk.rows
        are_metrics = isinstance(rows, dict) and rows.keys() == metrics.keys()
        return dict(jax.device_get(metrics) if are_metrics else self._last_logs())

    def _last_logs(self) -> PyTree:
        """Returns the logs of the last step."""
        last = self._last_chunk
        if last is None:
            return self._logs_before
        return row_of_step(fetch_rows(last.rows, last.steps), last.steps - 1)


def _have_equal_values(a: PyTree, b: PyTree) -> bool:
    """Returns True if two states have equal values. All processes have to call it together."""
    # One array that is in both states needs no comparison on the devices.
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x is y or bool(jnp.array_equal(x, y, equal_nan=True)) for x, y in pairs)
