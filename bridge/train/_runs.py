"""One call of fit, evaluate or predict: the loop over epochs, and who is told what."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.train import _callbacks, _feed
from bridge.train._loop import Loop, Options
from functrain.internal import fetched


class Evaluation:
    """What fit evaluates on, and when.

    Attributes:
      is_iterator: Whether every evaluation has the batches that follow the last one's.
    """

    def __init__(self, model: keras.Model, data: Any, size: Any, steps: Any, freq: Any) -> None:
        self._model, self._freq = model, freq
        data = keras.utils.unpack_x_y_sample_weight(data)
        self.is_iterator = isinstance(data[0], Iterator)
        self._source = functools.cache(lambda: _feed.source(model, data, size, steps, trains=False))

    def is_due(self, epoch: int) -> bool:
        """Whether this epoch, counted from 0, ends with it."""
        if isinstance(self._freq, list):  # of epochs counted from 1
            return epoch + 1 in self._freq
        return bool((epoch + 1) % self._freq == 0)

    def source(self) -> Any:
        """Returns the batches, by one iterator for all epochs, as Keras does."""
        source = self._source()
        keras_private.trainer.build_from(self._model, source)
        return source


@dataclasses.dataclass(eq=False, repr=False)
class Fit:
    """One call of `fit`."""

    model: keras.Model
    source: Any
    callbacks: Any
    evaluation: Evaluation | None
    options: Options

    def run(self, initial_epoch: int, epochs: int) -> Any:
        """Runs all epochs; the model is whole at the end, whatever happens."""
        model, callbacks, saving = self.model, self.callbacks, self.options.saving
        if saving is not None and not saving.begin(epochs, self.evaluation):
            return model.history
        model.stop_training = False
        self._lazy = _callbacks.only_read_model_attribute(callbacks)
        callbacks.on_train_begin()
        first = keras_private.trainer.initial_epoch(model) or initial_epoch
        if saving is not None and saving.resumed is not None:
            first = saving.position.epoch
        self._loop = Loop(model, "train", self.source, callbacks, self.options)
        quiet: Any = contextlib.nullcontext()
        if self._lazy:
            quiet = _callbacks.without_history_reading_model(callbacks, model)
        logs: dict[str, Any] = {}
        last: Any = None
        together: Any = self.options.stopping or contextlib.nullcontext()
        with together, self._kept_whole(epochs), quiet:
            if saving is not None and saving.resumed is not None and saving.resumed.nothing_left:
                saving.bring_back()
                first, last = epochs, self._loop.values()
            for epoch in range(first, epochs):
                logs = self._epoch(epoch)
                self.options.agree_to_stop(model)
                if saving is not None:
                    last = self._loop.values()
                    is_last = model.stop_training or epoch + 1 == epochs
                    saving.after_epoch(logs, is_last=is_last)
                self.options.act()
                if model.stop_training:
                    break
        callbacks.on_train_end(logs=logs)
        if saving is not None and last is not None:  # else no epoch was left
            saving.after_all(last, epochs, stopped=model.stop_training)
        terminate = keras.callbacks.TerminateOnNaN  # it prints by itself
        if not any(isinstance(x, terminate) for x in getattr(callbacks, "callbacks", ())):
            _warn_of_loss(model.history)
        return model.history

    @contextlib.contextmanager
    def _kept_whole(self, epochs: int) -> Any:
        """Brings the model up to date, however it ends."""
        try:
            yield
        except BaseException as error:
            if not self._finish(epochs):
                error.add_note(
                    "The program that failed took the model's values along: there is no copy of a "
                    "model of this size. Load its weights again; "
                    "keras.callbacks.BackupAndRestore keeps some on disk."
                )
            raise
        self._finish(epochs)

    def _finish(self, epochs: int) -> bool:
        whole = self._loop.sync()
        optimizer = self.model.optimizer
        if whole and isinstance(optimizer, keras.optimizers.Optimizer) and epochs > 0:
            optimizer.finalize_variable_values(self.model.trainable_weights)
        return whole

    def _epoch(self, epoch: int) -> dict[str, Any]:
        model, callbacks, saving = self.model, self.callbacks, self.options.saving
        resume = self._begin_epoch(epoch)
        for chunk, _ in self._loop.run(resume):
            if saving is not None:
                saving.after(chunk.steps)
        due = self.evaluation is not None and self.evaluation.is_due(epoch)
        evaluation = self.evaluation if due else None
        logs = self._loop.logs()
        if evaluation is not None or not self._lazy:
            self._loop.sync()
        if evaluation is not None:
            source = evaluation.source()
            if saving is not None:
                saving.begin_evaluation()
            options = self.options._replace(within_fit=True)
            found = run_evaluate(model, source, callbacks, options)
            logs.update({f"val_{name}": value for name, value in found.items()})
        callbacks.on_epoch_end(epoch, logs)
        return logs

    def _begin_epoch(self, epoch: int) -> _feed.Resume | None:
        """Tells callbacks; returns where in the epoch to go on, if a checkpoint says so."""
        saving = self.options.saving
        resume: _feed.Resume | None = None
        if saving is None or saving.resumed is None:
            self._loop.reset_metrics()
            self.callbacks.on_epoch_begin(epoch)
        elif saving.position.batch:  # callbacks have done what they do here: it is undone
            self.callbacks.on_epoch_begin(epoch)
            resume = saving.bring_back()
        else:
            saving.bring_back()
            self._loop.reset_metrics()
            self.callbacks.on_epoch_begin(epoch)
        if saving is not None:
            saving.begin_epoch(epoch, self._loop)
        return resume


def run_evaluate(
    model: keras.Model, source: Any, callbacks: Any, options: Options
) -> dict[str, Any]:
    """Evaluates a built model on batches; returns its metrics."""
    model.stop_evaluating = False
    callbacks.on_test_begin()
    loop = Loop(model, "test", source, callbacks, options)
    loop.reset_metrics()
    try:
        for _ in loop.run():
            pass
        logs = _callbacks.as_floats(loop.logs())
    finally:
        loop.sync()
    callbacks.on_test_end(logs)
    if not options.within_fit:  # which acts at the end of the epoch
        options.act()
    return logs


def run_predict(model: keras.Model, source: Any, callbacks: Any, options: Options) -> Any:
    """Predicts with a built model; returns NumPy arrays."""
    model.stop_predicting = False
    callbacks.on_predict_begin()
    loop = Loop(model, "predict", source, callbacks, options)
    try:
        outputs = fetched((rows, chunk.steps) for chunk, rows in loop.run())
    finally:
        loop.sync()
    callbacks.on_predict_end()
    options.act()
    if not outputs:
        raise ValueError("x: expected at least one batch to predict from, got none")
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *outputs)


def _warn_of_loss(history: keras.callbacks.History) -> None:
    """Warns of the first epoch whose loss was not finite."""
    for epoch, loss in zip(history.epoch, history.history.get("loss", ()), strict=False):
        if not np.isfinite(loss):
            warnings.warn(
                f"bridge.fit: expected a finite loss, got {loss}, first in epoch {epoch}, counted "
                "from 0. Look for NaN in the data, and for labels outside of the classes. "
                "functrain.explain_nan(bridge.train_step(model), bridge.keras_state(model, "
                "batch), batch) names the operation that made it: pass a model from before.",
                stacklevel=5,  # the line that called fit
            )
            return
