"""One call of fit, evaluate or predict: the loop over epochs, and who is told what."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.train import _feed
from bridge.train._callbacks import (
    BatchCallbacks,
    as_floats,
    only_read_model_attribute,
    without_history_reading_model,
)
from bridge.train._loop import Loop, Options
from bridge.train._saving import KerasSaving
from functrain.internal import fetched


class Evaluation:
    """What fit evaluates on, and when.

    Attributes:
      is_iterator: Whether every evaluation has the batches that follow the last one's.
    """

    def __init__(self, model: keras.Model, data: Any, size: Any, steps: Any, freq: Any) -> None:
        self._model = model
        data = keras.utils.unpack_x_y_sample_weight(data)
        self.is_iterator = isinstance(data[0], Iterator)
        self._make = functools.partial(_feed.source, model, data, size, steps)
        self._freq = freq
        self._source: Any = None

    def is_due(self, epoch: int) -> bool:
        """Whether this epoch, counted from 0, ends with it."""
        if isinstance(self._freq, list):  # of epochs counted from 1
            return epoch + 1 in self._freq
        return bool((epoch + 1) % self._freq == 0)

    def source(self) -> Any:
        """Returns the batches, by one iterator for all epochs, as Keras does."""
        if self._source is None:
            self._source = self._make()
        keras_private.build_from(self._model, self._source)
        return self._source


class Fit:
    """One call of `fit`."""

    def __init__(
        self,
        model: keras.Model,
        source: Any,
        callbacks: Any,
        evaluation: Evaluation | None,
        options: Options,
        saving: KerasSaving | None = None,
    ) -> None:
        self._model = model
        self._source = source
        self._saving = saving
        self._callbacks = callbacks
        self._evaluation = evaluation
        self._options = options

    def __call__(self, initial_epoch: int, epochs: int) -> Any:
        """Runs all epochs; the model is whole at the end, whatever happens."""
        model, logs = self._model, {}
        if self._saving is not None and not self._saving.begin(epochs, self._evaluation):
            return model.history
        model.stop_training = False
        self._lazy = only_read_model_attribute(self._callbacks)
        self._callbacks.on_train_begin()
        first = keras_private.initial_epoch(model) or initial_epoch
        if self._saving is not None and self._saving.is_to_bring_back:
            first = self._saving.position.epoch
        calls = BatchCallbacks(self._callbacks, "train")
        self._loop = Loop(model, "train", self._source, calls, self._options)
        quiet: Any = contextlib.nullcontext()
        if self._lazy:
            quiet = without_history_reading_model(self._callbacks, model)
        last: Any = None
        with self._kept_whole(epochs), quiet:
            if self._saving is not None and self._saving.nothing_left:
                self._saving.bring_back()
                first, last = epochs, self._loop.values()
            for epoch in range(first, epochs):
                logs = self._epoch(epoch)
                if self._saving is not None:
                    last = self._loop.values()
                    is_last = model.stop_training or epoch + 1 == epochs
                    self._saving.after_epoch(logs, is_last=is_last)
                self._options.act()
                if model.stop_training:
                    break
        self._callbacks.on_train_end(logs=logs)
        if self._saving is not None and last is not None:  # else no epoch was left
            self._saving.after_all(last, epochs, stopped=model.stop_training)
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
        optimizer = self._model.optimizer
        if whole and isinstance(optimizer, keras.optimizers.Optimizer) and epochs > 0:
            optimizer.finalize_variable_values(self._model.trainable_weights)
        return whole

    def _epoch(self, epoch: int) -> dict[str, Any]:
        model, saving = self._model, self._saving
        resume = self._begin_epoch(epoch)
        for chunk, _ in self._loop.run(resume):
            if saving is not None:
                saving.after(chunk.steps)
        evaluation = self._evaluation
        evaluates = evaluation is not None and evaluation.is_due(epoch)
        logs = self._loop.logs()
        if evaluates or not self._lazy:
            self._loop.sync()
        if evaluation is not None and evaluates:
            source = evaluation.source()
            if saving is not None:
                saving.begin_evaluation()
            found = run_evaluate(model, source, self._callbacks, self._options, within_fit=True)
            logs.update({f"val_{name}": value for name, value in found.items()})
        self._callbacks.on_epoch_end(epoch, logs)
        return logs

    def _begin_epoch(self, epoch: int) -> _feed.Resume | None:
        """Tells callbacks; returns where in the epoch to go on, if a checkpoint says so."""
        saving = self._saving
        if saving is None or not saving.is_to_bring_back:
            self._loop.reset_metrics()
            self._callbacks.on_epoch_begin(epoch)
            resume = None
        elif saving.position.batch:  # callbacks have done what they do here: it is undone
            self._callbacks.on_epoch_begin(epoch)
            resume = saving.bring_back()
            self._loop.reported_before = saving.reported
        else:
            resume = saving.bring_back()
            self._loop.reset_metrics()
            self._callbacks.on_epoch_begin(epoch)
        if saving is not None:
            saving.begin_epoch(epoch, self._loop)
        return resume


def run_evaluate(
    model: keras.Model, source: Any, callbacks: Any, options: Options, *, within_fit: bool = False
) -> dict[str, Any]:
    """Evaluates a built model on batches; returns its metrics."""
    model.stop_evaluating = False
    callbacks.on_test_begin()
    calls = BatchCallbacks(callbacks, "test", quiet=within_fit)
    loop = Loop(model, "test", source, calls, options)
    loop.reset_metrics()
    try:
        for _ in loop.run():
            pass
        logs = as_floats(loop.logs())
    finally:
        loop.sync()
    callbacks.on_test_end(logs)
    if not within_fit:  # which acts at the end of the epoch
        options.act()
    return logs


def run_predict(model: keras.Model, source: Any, callbacks: Any, options: Options) -> Any:
    """Predicts with a built model; returns NumPy arrays."""
    model.stop_predicting = False
    callbacks.on_predict_begin()
    calls = BatchCallbacks(callbacks, "predict")
    loop = Loop(model, "predict", source, calls, options)
    try:
        outputs = fetched((rows, chunk.steps) for chunk, rows in loop.run())
    finally:
        loop.sync()
    callbacks.on_predict_end()
    options.act()
    if not outputs:
        raise ValueError("x: expected at least one batch to predict from, got none")
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *outputs)
