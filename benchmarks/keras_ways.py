"""The ways of Keras itself. Only keras and numpy are imported, so any backend can run them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from benchmarks.workloads import Workload

Run = Callable[[], float]


def compiled(workload: Workload, **options: int) -> keras.Model:
    """Returns the workload's model, compiled with the settings that all ways share."""
    model = workload.model()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3, epsilon=1e-7),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def fitting(model: keras.Model, workload: Workload, fit: Callable[..., Any], verbose: int) -> Run:
    """Returns a run of one epoch of ``fit(model, ...)`` on arrays in memory."""
    x, y = workload.data()

    def run() -> float:
        with hidden_output() if verbose else contextlib.nullcontext():
            history = fit(model, x, y, batch_size=workload.batch, shuffle=False, verbose=verbose)
        return float(history.history["loss"][-1])

    return run


@contextlib.contextmanager
def hidden_output() -> Iterator[None]:
    """Discards the output of a progress bar, which draws itself as in a terminal."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        nowhere.isatty = lambda: True  # type: ignore[method-assign]
        yield


def keras_fit(workload: Workload, steps_per_execution: int = 1, verbose: int = 0) -> Run:
    """Returns a run of `fit` on arrays in memory."""
    model = compiled(workload, steps_per_execution=steps_per_execution)
    return fitting(model, workload, type(model).fit, verbose)


def keras_fit_bar(workload: Workload) -> Run:
    """Returns a run of `fit` with its progress bar."""
    return keras_fit(workload, verbose=1)


def keras_fit_32(workload: Workload) -> Run:
    """Returns a run of `fit` with `steps_per_execution=32`."""
    return keras_fit(workload, min(32, workload.steps))


def predicting(workload: Workload, predict: Callable[[np.ndarray], np.ndarray]) -> Run:
    """Returns a run that predicts from all inputs and summarizes the outputs in a number."""
    x, _ = workload.data()
    return lambda: checksum(predict(x))


def checksum(outputs: np.ndarray) -> float:
    """Returns a number by which the outputs of the ways can be compared."""
    # A sample is enough, and does not add to the time that is measured. The weights make the number
    # depend on the order of the outputs.
    sample = np.abs(outputs.ravel()[:: outputs.size // 4096 + 1])
    return float(np.mean(sample * np.linspace(0, 2, sample.size)))


def keras_predict(workload: Workload, steps_per_execution: int = 1) -> Run:
    """Returns a run of `predict` on an array in memory."""
    model = compiled(workload, steps_per_execution=steps_per_execution)
    return predicting(workload, lambda x: model.predict(x, batch_size=workload.batch, verbose=0))


def keras_predict_32(workload: Workload) -> Run:
    """Returns a run of `predict` with `steps_per_execution=32`."""
    return keras_predict(workload, min(32, workload.steps))
