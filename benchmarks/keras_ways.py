"""Keras's own ways; nothing but keras and numpy is imported, so that any backend can run them."""

from collections.abc import Callable

import keras

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


def keras_fit(workload: Workload, steps_per_execution: int = 1) -> Run:
    """`fit` on arrays in memory."""
    model = compiled(workload, steps_per_execution=steps_per_execution)
    x, y = workload.data()

    def run() -> float:
        history = model.fit(x, y, batch_size=workload.batch, shuffle=False, verbose=0)
        return history.history["loss"][-1]

    return run


def keras_fit_32(workload: Workload) -> Run:
    """`fit` with `steps_per_execution=32`."""
    return keras_fit(workload, min(32, workload.steps))
