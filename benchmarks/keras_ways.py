"""Keras's own ways; nothing but keras and numpy is imported, so that any backend can run them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from benchmarks.workloads import Workload

Run = Callable[[], float]


def compiled(workload: Workload, **options: int) -> keras.Model:
    """Returns the workload's model, compiled as every way has it."""
    model = workload.model()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3, epsilon=1e-7),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    return model


def fitting(model: keras.Model, workload: Workload, fit: Callable[..., Any], verbose: int) -> Run:
    """Returns one epoch of ``fit(model, ...)`` on arrays in memory."""
    x, y = workload.data()

    def run() -> float:
        with hidden_output() if verbose else contextlib.nullcontext():
            history = fit(model, x, y, batch_size=workload.batch, shuffle=False, verbose=verbose)
        return float(history.history["loss"][-1])

    return run


@contextlib.contextmanager
def hidden_output() -> Iterator[None]:
    """Lets a progress bar draw itself to nowhere, as it would in a terminal."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        nowhere.isatty = lambda: True  # type: ignore[method-assign]
        yield


def keras_fit(workload: Workload, steps_per_execution: int = 1, verbose: int = 0) -> Run:
    """`fit` on arrays in memory."""
    model = compiled(workload, steps_per_execution=steps_per_execution)
    return fitting(model, workload, type(model).fit, verbose)


def keras_fit_bar(workload: Workload) -> Run:
    """`fit` with its progress bar."""
    return keras_fit(workload, verbose=1)


def keras_fit_32(workload: Workload) -> Run:
    """`fit` with `steps_per_execution=32`."""
    return keras_fit(workload, min(32, workload.steps))


def predicting(workload: Workload, predict: Callable[[np.ndarray], np.ndarray]) -> Run:
    """Returns one prediction from all inputs, which tells its outputs in one number."""
    x, _ = workload.data()
    return lambda: told(predict(x))


def told(outputs: np.ndarray) -> float:
    """Returns a number that tells outputs apart: of some, the later the more they count."""
    some = np.abs(outputs.ravel()[:: outputs.size // 4096 + 1])  # a look at all takes its time
    return float(np.mean(some * np.linspace(0, 2, some.size)))


def keras_predict(workload: Workload, steps_per_execution: int = 1) -> Run:
    """`predict` on an array in memory."""
    model = compiled(workload, steps_per_execution=steps_per_execution)
    return predicting(workload, lambda x: model.predict(x, batch_size=workload.batch, verbose=0))


def keras_predict_32(workload: Workload) -> Run:
    """`predict` with `steps_per_execution=32`."""
    return keras_predict(workload, min(32, workload.steps))
