"""One call of fit, evaluate or predict: the loop over epochs, and who is told what."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.train import _feed as _keras_feed
from bridge.train._callbacks import BatchCallbacks, asks_for_the_model, row, unasking
from bridge.train._loop import FuseArg, Loop
from functrain.internal import Mode, PyTree

Interrupted = Callable[[], bool]


class Evaluation:
    """What fit evaluates on, and when."""

    def __init__(self, model: keras.Model, data: Any, size: Any, steps: Any, freq: Any) -> None:
        self._model = model
        data = keras.utils.unpack_x_y_sample_weight(data)
        self._make = functools.partial(_keras_feed.source, model, data, size, steps)
        self._freq = freq
        self._source: Any = None

    def is_due(self, epoch: int) -> bool:
        """Whether this epoch ends with it."""
        return keras_private.is_due(self._model, epoch, self._freq)

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
        ways: tuple[FuseArg, Mode, Interrupted],
    ) -> None:
        self._model = model
        self._source = source
        self._callbacks = callbacks
        self._evaluation = evaluation
        self._ways = ways

    def __call__(self, initial_epoch: int, epochs: int) -> Any:
        """Runs all epochs; the model is whole at the end, whatever happens."""
        model, logs, finished = self._model, {}, False
        model.stop_training = False
        self._lazy = asks_for_the_model(self._callbacks)
        self._callbacks.on_train_begin()
        first = keras_private.initial_epoch(model) or initial_epoch
        self._loop = Loop(model, "train", *self._ways)
        self._calls = BatchCallbacks(self._callbacks, "train")
        self._feed = self._loop.feed(self._source, self._calls)
        try:
            with unasking(self._callbacks, model) if self._lazy else contextlib.nullcontext():
                for epoch in range(first, epochs):
                    logs = self._epoch(epoch)
                    _raise_if(self._ways[2])
                    if model.stop_training:
                        break
            finished = True
        finally:
            self._loop.sync()
            if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
                model.optimizer.finalize_variable_values(model.trainable_weights)
            if finished:
                self._callbacks.on_train_end(logs=logs)
        return model.history

    def _epoch(self, epoch: int) -> dict[str, Any]:
        model = self._model
        self._loop.reset_metrics()
        self._callbacks.on_epoch_begin(epoch)
        for _ in self._loop.run(self._feed, self._calls):
            pass
        evaluates = self._evaluation is not None and self._evaluation.is_due(epoch)
        logs = self._loop.logs()
        if evaluates or not self._lazy:
            self._loop.sync()
        if evaluates:
            assert self._evaluation is not None
            source = self._evaluation.source()
            found = run_evaluate(model, source, self._callbacks, *self._ways, within_fit=True)
            logs.update({f"val_{name}": value for name, value in found.items()})
        self._callbacks.on_epoch_end(epoch, logs)
        return logs


def run_evaluate(
    model: keras.Model,
    source: Any,
    callbacks: Any,
    fuse: FuseArg,
    rewrites: Mode,
    interrupted: Interrupted,
    *,
    within_fit: bool = False,
) -> dict[str, Any]:
    """Evaluates a built model on batches; returns its metrics."""
    model.stop_evaluating = False
    callbacks.on_test_begin()
    loop = Loop(model, "test", fuse, rewrites, interrupted)
    loop.reset_metrics()
    calls = BatchCallbacks(callbacks, "test", quiet=within_fit)
    try:
        for _ in loop.run(loop.feed(source, calls), calls):
            pass
        logs = keras_private.to_python(loop.logs())
    finally:
        loop.sync()
    callbacks.on_test_end(logs)
    _raise_if(interrupted)
    return logs


def run_predict(
    model: keras.Model,
    source: Any,
    callbacks: Any,
    fuse: FuseArg,
    rewrites: Mode,
    interrupted: Interrupted,
) -> Any:
    """Predicts with a built model; returns NumPy arrays."""
    model.stop_predicting = False
    callbacks.on_predict_begin()
    loop = Loop(model, "predict", fuse, rewrites, interrupted)
    calls = BatchCallbacks(callbacks, "predict")
    outputs: list[PyTree] = []
    late: list[tuple[_keras_feed.Chunk, PyTree]] = []
    try:
        for found in loop.run(loop.feed(source, calls), calls):
            outputs += _fetched(late)  # while the device is busy with what was found now
            late = [found]
    finally:
        loop.sync()
    outputs += _fetched(late)
    callbacks.on_predict_end()
    _raise_if(interrupted)
    if not outputs:
        raise ValueError("x: expected at least one batch to predict from, got none")
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *outputs)


def _fetched(late: list[tuple[_keras_feed.Chunk, PyTree]]) -> list[PyTree]:
    """Returns the outputs of every step, on the host."""
    found = [(chunk, jax.device_get(rows)) for chunk, rows in late]
    return [row(rows, chunk, i) for chunk, rows in found for i in range(chunk.steps)]


def _raise_if(interrupted: Interrupted) -> None:
    """Raises the Ctrl-C that was held back while a callback ran."""
    if interrupted():
        raise KeyboardInterrupt
