"""States, steps and batches of the benchmark's workloads."""

import functools
from typing import Any

import keras
import pytest

import bridge
import functrain as ft
from benchmarks.jax_ways import functrain_parts
from benchmarks.keras_ways import compiled
from benchmarks.workloads import WORKLOADS


def parts(name: str) -> tuple[Any, Any, Any]:
    """Returns a state, a step over it, and a batch; `keras: ` has Keras's own step."""
    workload = WORKLOADS[name.removeprefix("keras: ")]
    batch = workload.make_data(workload.batch)
    with pytest.MonkeyPatch.context() as patch:
        for layer in (keras.layers.LSTM, keras.layers.GRU):
            # cuDNN cannot be traced without a GPU.
            without_cudnn = functools.partialmethod(layer.__init__, use_cudnn=False)
            patch.setattr(layer, "__init__", without_cudnn)
        if name.startswith("keras: "):
            model = compiled(workload)
            return bridge.keras_state(model, batch), bridge.train_step(model), batch
        state, step = functrain_parts(workload)
    return step.start(state) if isinstance(step, ft.MeteredStep) else state, step, batch
