"""A hook that runs Keras's callbacks, metrics and evaluations around a run."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.train._callbacks import BatchCallbacks, LoggerCallback, flat
from bridge.train._memory import Memory
from bridge.train._steps import ModelValues
from functrain.events import ChunkEnd, EpochEnd, Event, RunEnd
from functrain.internal import (
    Batches,
    ChunkBegin,
    EpochBegin,
    Loop,
    PyTree,
    fetch_rows,
    is_number,
    row_of_step,
    tree,
    warn,
)

# The attribute of a model by which callbacks stop each kind of run.
_STOP = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


class KerasHook:
    """Calls Keras's callbacks around the chunks and epochs of a run.

    The run stops if a callback sets `model.stop_training`, `stop_evaluating` or
    `stop_predicting`. The hook is also a trigger: chunks end where a callback acts on the model.

    Args:
      model: The model; it and all that `compile` made are built.
      kind: "train", "test" or "predict".
      batches: The data of the run.
      callbacks: Keras's list.
      evaluation: The `Evaluation` of a fit, or None.
      quiet: Do not show the progress bar.

    Attributes:
      memory: The states of callbacks, for a fit with a checkpointer.
      calls: The batch methods of the callbacks.
      receivers: Of logs, one chunk late: progress bars and the loggers of functrain.
      values: The model's values.
      finalizes: True if the optimizer may overwrite the weights with its averages after a fit.
      logs: The values of the last epoch.
    """

    def __init__(
        self,
        model: keras.Model,
        kind: str,
        batches: Batches,
        callbacks: Any,
        *,
        evaluation: Any = None,
        quiet: bool = False,
    ) -> None:
        self.model, self.kind, self.batches, self.callbacks = model, kind, batches, callbacks
        self.evaluation = evaluation
        self.memory: Memory | None = None
        self.calls = BatchCallbacks(callbacks, kind, quiet=quiet)
        # The evaluations of a fit share its callbacks, and the fit alone passes logs to loggers.
        loggers = [x for x in flat(callbacks) if isinstance(x, LoggerCallback)]
        self.receivers = [x.take for x in loggers] if kind == "train" else []
        self.receivers += [self.calls.show_progress] if self.calls.bars else []
        self.values = ModelValues(model, kind)
        self.finalizes = kind == "train"
        self.logs: dict[str, Any] = {}
        # True once the first batch of the next chunk has begun, which comes before it is fetched.
        self._has_begun_batch = False
        self._steps_until_action: int | None = None
        batches.data.before_fetch = self._begin_batch
        self._last_chunk: ChunkEnd | None = None
        # The steps taken since the end of an execution, of `steps_per_execution` steps.
        self._steps_in_execution = 0
        # The logs of the last step before the checkpoint from which the run resumed.
        self._logs_before: PyTree = {}
        self._has_warned = False

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
        if isinstance(event, ChunkEnd | EpochEnd):
            # A callback may have asked to stop, and not taken that back since.
            event.stopped = self.is_stopped
            # Several processes run until all of them have agreed to stop.
            if jax.process_count() > 1:
                self.is_stopped = False

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
        try:
            getattr(self.callbacks, f"on_{self.kind}_begin")()
        except BaseException:
            self.values.restore(None)
            raise

    def next_step(self, step: int) -> int | None:
        """Returns the next step at which a chunk has to end; None if no callback needs that."""
        execution = int(self.model.steps_per_execution)
        if self.is_stopped and jax.process_count() == 1:
            # A callback stopped the run before the first batch. Keras checks that only after its
            # first program, of `steps_per_execution` steps.
            return step + execution
        steps = self._steps_until_action
        if not self._has_begun_batch:
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

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint stores beside the model's values."""
        assert self.memory is not None, "a fit with a checkpointer has one"
        return {
            "memory": self.memory.state(),
            "reported": self._last_logs(),
            "logs": keras_private.trainer.as_floats(self.logs),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Keeps what `state` returned. Callbacks are restored when the first epoch begins."""
        assert self.memory is not None, "a fit with a checkpointer has one"
        self.memory.restore(state["memory"])
        self._logs_before, self.logs = state["reported"], state["logs"]

    @contextlib.contextmanager
    def whole_at_end(self, run: Loop) -> Iterator[None]:
        """Context manager: closes a run, and leaves the model with all its values.

        A program that failed after it had consumed the values leaves none.
        """
        failure: BaseException | None = None
        try:
            with contextlib.closing(run):
                yield
        except BaseException as error:
            failure = error
            raise
        finally:
            # The function refers to this object, which refers to the batches.
            self.batches.data.before_fetch = None
            last = run.last_complete_state()
            if self.values.restore(None if last is None else last[0]):
                # What ended the run is raised, not an error that follows from it.
                with contextlib.suppress(Exception):
                    self._finalize()
            elif failure is not None:
                failure.add_note(
                    "The program that failed had consumed the model's values. Load its weights "
                    "again; bridge.fit(checkpointer=) and keras.callbacks.BackupAndRestore keep "
                    "some on disk."
                )

    def _begin_epoch(self, event: EpochBegin) -> None:
        self._steps_in_execution = event.position.batch % int(self.model.steps_per_execution)
        if self.memory is not None and self.memory.is_pending:
            self._resume(event, self.memory)
        if not event.position.batch:
            if self.kind != "predict":
                self.model.reset_metrics()
            if self.kind == "train":
                self.callbacks.on_epoch_begin(event.epoch)
        # A callback may have frozen layers.
        self.values.find_variables()
        self.values.update(event)

    def _resume(self, event: Event, memory: Memory) -> None:
        """Puts the values of a checkpoint into the model, and restores the callbacks."""
        if isinstance(event, EpochBegin) and event.position.batch:
            # The callbacks began this epoch before the checkpoint was written. They have to begin
            # it again, and the changes that they make to the model are undone. They get copies,
            # since Keras's evaluate and predict donate the model's arrays.
            self.values.push(tree.copy(event.state))
            self.callbacks.on_epoch_begin(event.epoch)
        self.values.push(event.state)
        memory.restore_callbacks()

    def _begin_batch(self, batch: int) -> None:
        """Calls the callbacks that begin a batch, before it is fetched, as in Keras."""
        # Read before, since TensorBoard counts the batches that have begun.
        self._steps_until_action = self.calls.steps_until_action()
        self.calls.begin_batch(batch)
        self._has_begun_batch = True

    def _begin_chunk(self, event: ChunkBegin) -> None:
        # The first batch of a chunk has been fetched already if its shape ended the chunk before.
        if not self._has_begun_batch:
            self.calls.begin_batch(event.chunk.batch_info[0].begin)
        self._has_begun_batch = False
        # As in Keras, weights that a callback sets when a batch begins are those of its step.
        self.values.pull(event)

    def _end_chunk(self, event: ChunkEnd) -> None:
        # `event.state` would flatten the state, to find out later whether a leaf was assigned.
        self.values.push(event.original_state())
        self._last_chunk = event
        self._steps_in_execution = event.position.batch % int(self.model.steps_per_execution)
        if self.calls.acting:
            self.calls.end_chunk(event)
            self.values.update(event)

    def _end_epoch(self, event: EpochEnd) -> None:
        # The data may have changed the model at the end of their epoch.
        self.values.update(event)
        # Another process may have stopped the run.
        if event.stopped:
            self.is_stopped = True
        # Keras begins a batch before it finds out that the data have run out.
        if not self._has_begun_batch:
            self.calls.begin_batch(self.batches.data.missing)
        self._has_begun_batch = False
        if self.kind != "predict":
            logs = self._last_logs()
            # If the data ran out before the epoch, Keras repeats the logs of the last step.
            if event.position.batch:
                logs = keras_private.trainer.epoch_logs(self.model, logs)
            self.logs = dict(logs)
        if self.kind == "train":
            self._end_training_epoch(event)
        self.values.update(event)

    def _end_training_epoch(self, event: EpochEnd) -> None:
        if self.evaluation is not None:
            for name, value in self.evaluation(self.model, event.epoch, self.callbacks).items():
                self.logs[f"val_{name}"] = value
        # A train_step of the user's may report one for each output.
        losses = jax.tree.leaves(self.logs.get("loss"))
        if not (self._has_warned or all(np.isfinite(np.asarray(loss)).all() for loss in losses)):
            self._warn_of_loss(event.epoch)
        with _monitor_notes(self.logs):
            self.callbacks.on_epoch_end(event.epoch, self.logs)
        # The checkpointer chooses the best epoch by these values.
        event.values |= {name: float(x) for name, x in self.logs.items() if is_number(x)}

    def _warn_of_loss(self, epoch: int) -> None:
        """Warns once of a loss that is not finite."""
        self._has_warned = True
        # TerminateOnNaN prints its own message.
        if not any(isinstance(x, keras.callbacks.TerminateOnNaN) for x in flat(self.callbacks)):
            warn(
                f"bridge.fit: expected a finite loss, got {self.logs['loss']}, first in epoch "
                f"{epoch}, counted from 0. functrain.inspect.explain_nan(bridge.keras_state(model, "
                "batch), bridge.train_step(model), batch) names the operation that made it: pass a "
                "model from before."
            )

    def _end_run(self, event: RunEnd) -> None:
        if self.kind == "predict":
            self.callbacks.on_predict_end()
        elif self.kind == "test":
            self.logs = keras_private.trainer.as_floats(self.logs)
            self.callbacks.on_test_end(self.logs)
        else:
            self._end_training(event)

    def _end_training(self, event: RunEnd) -> None:
        if jax.process_count() > 1:
            self.is_stopped = event.was_stopped
        # A resumed fit that has no epoch left has not restored its callbacks yet.
        if self.memory is not None and self.memory.is_pending:
            self._resume(event, self.memory)
        # The run saves its own arrays after this event, and Keras donates those of the model if a
        # callback evaluates or predicts.
        if self.memory is not None:
            self.values.push(tree.copy(self.values.read()))
        self._finalize()
        self.callbacks.on_train_end(logs=self.logs)
        # Other final values are saved beside the state from which a longer fit continues.
        if self.memory is not None:
            self.values.update(event)

    def _finalize(self) -> None:
        """Overwrites the weights with the optimizer's averages after a fit, once, as Keras does."""
        is_due, self.finalizes = self.finalizes, False
        if is_due and isinstance(self.model.optimizer, keras.optimizers.Optimizer):
            self.model.optimizer.finalize_variable_values(self.model.trainable_weights)

    def _last_logs(self) -> PyTree:
        """Returns the logs of the last step."""
        last = self._last_chunk
        if last is None:
            return self._logs_before
        return row_of_step(fetch_rows(last.rows, last.steps), last.steps - 1)


@contextlib.contextmanager
def _monitor_notes(logs: dict[str, Any]) -> Iterator[None]:
    """Context manager: tells of a monitored value that is missing, for which Keras asks a mode."""
    try:
        yield
    except ValueError as error:
        callback = keras_private.callbacks.callback_without_mode(error)
        if callback is not None and callback.monitor not in logs:
            error.add_note(f"monitor: expected one of {sorted(logs)}, got {callback.monitor!r}.")
        raise
