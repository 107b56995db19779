"""TerminateOnNaN ends training at the batch at which it ends it under Keras, to the bit."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import keras
import numpy as np
import pytest
from keras.callbacks import TerminateOnNaN

from tests.bridge.fitting import assert_same


class Batches(keras.callbacks.Callback):
    """Writes down which batches ended."""

    chunk_safe = True

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended.append(batch)


def run(way: Any, bad: float, callbacks: list[Any], steps: int = 1, **kwargs: Any) -> keras.Model:
    """Fits 200 batches, of which the third has a loss that is not finite."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mae", steps_per_execution=steps)
    x, y = np.ones((6400, 4), np.float32), np.ones((6400, 1), np.float32)
    y[64] = bad
    way(model, x, y, shuffle=False, verbose=0, callbacks=callbacks, **kwargs)
    return model


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_training_ends_at_its_batch(bad: float, capsys: Any) -> None:
    theirs = run(keras.Model.fit, bad, [TerminateOnNaN()])
    said = capsys.readouterr().out
    ours = run(bridge.fit, bad, [type("Subclass", (TerminateOnNaN,), {})()])
    assert capsys.readouterr().out == said == "Batch 2: Invalid loss, terminating training\n"
    assert int(ours.optimizer.iterations.value) == 3
    assert_same(ours, theirs)


def test_steps_per_execution_end_where_they_do_under_keras() -> None:
    ours, theirs = (
        run(way, np.inf, [TerminateOnNaN()], 5) for way in (bridge.fit, keras.Model.fit)
    )
    assert int(ours.optimizer.iterations.value) == 5
    assert_same(ours, theirs)


def test_an_explicit_k_reports_no_batch_after_it_and_trains_to_the_chunks_end(capsys: Any) -> None:
    batches = Batches()
    model = run(bridge.fit, np.inf, [TerminateOnNaN(), batches], fuse=50)
    assert capsys.readouterr().out == "Batch 2: Invalid loss, terminating training\n"
    assert batches.ended == [0, 1, 2]
    assert int(model.optimizer.iterations.value) == 50


def test_a_loss_for_each_output_need_not_be_finite_either() -> None:
    class Reports(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            logs, state = super().train_step(state, data)
            # With the keys of the metrics alone, Keras reports the metrics instead.
            return {"loss": keras.ops.stack([logs["loss"], np.nan]), "more": 1.0}, state

    model = Reports([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mae")
    with pytest.warns(
        UserWarning, match=r"expected a finite loss, got \[.*nan\], first in epoch 0"
    ):
        bridge.fit(model, np.ones((64, 4)), np.ones((64, 1)), verbose=0)


def test_a_fit_without_it_names_the_epoch_and_what_finds_the_cause() -> None:
    with pytest.warns(UserWarning, match=r"first in epoch 0, .*explain_nan") as caught:
        run(bridge.fit, np.nan, [], epochs=2)
    assert len(caught) == 1
    assert caught[0].filename == __file__
