"""bridge.fit with a checkpointer where Ctrl-C or SIGTERM comes."""

import signal
from typing import Any

import keras
import pytest

import functrain as ft
from tests.bridge.fitting import assert_same
from tests.bridge.train.interrupting import (
    dense,
    evaluated,
    fit,
)


class Signalled(keras.callbacks.Callback):
    """Has Ctrl-C come in an evaluation, with the model brought up to date by a callback."""

    chunk_safe = True

    def __init__(self, method: str) -> None:
        super().__init__()
        self.came = False
        setattr(self, method, self._raise_once)

    def _raise_once(self, *_: Any, logs: Any = None) -> None:
        assert self.model.metrics_variables
        if not self.came:
            self.came = True
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("method", ["on_test_batch_end", "on_test_end"])
def test_ctrl_c_in_an_evaluation_saves_after_it(method, tmp_path, ctrl_c) -> None:
    def two_epochs() -> dict[str, Any]:
        return {**evaluated(), "epochs": 2}

    model, history = fit(dense, two_epochs, keras.Model.fit)
    checkpoints = ft.Checkpointer(tmp_path, every=ft.every(steps=1000))
    with pytest.raises(KeyboardInterrupt):
        fit(dense, two_epochs, checkpointer=checkpoints, callbacks=[Signalled(method)])
    assert checkpoints.latest() == 7
    again, found = fit(dense, two_epochs, checkpointer=checkpoints)
    assert_same(again, model)
    assert found.history == history.history


def test_ctrl_c_in_the_evaluation_of_a_stopped_fit_does_not_undo_the_stop(tmp_path, ctrl_c) -> None:
    def stop(batch: int, logs: Any) -> None:
        stopper.model.stop_training = True

    stopper = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    callbacks = [stopper, Signalled("on_test_batch_end")]
    checkpoints = ft.Checkpointer(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(dense, evaluated, checkpointer=checkpoints, callbacks=callbacks, fuse=1)
    _, history = fit(dense, evaluated, checkpointer=checkpoints)
    assert checkpoints.steps() == [1]
    assert len(history.history["val_loss"]) == 1


def test_a_fit_with_nothing_left_ends_with_the_logs_of_its_last_epoch(tmp_path) -> None:
    def fail(logs: Any) -> None:
        raise InterruptedError

    seen: list[dict[str, Any]] = []
    checkpoints = ft.Checkpointer(tmp_path)
    failing = keras.callbacks.LambdaCallback(on_train_end=fail)
    reading = keras.callbacks.LambdaCallback(on_train_end=seen.append)
    with pytest.raises(InterruptedError):
        fit(dense, lambda: {"epochs": 1}, checkpointer=checkpoints, callbacks=[failing])
    _, history = fit(dense, lambda: {"epochs": 1}, checkpointer=checkpoints, callbacks=[reading])
    assert seen == [{name: values[-1] for name, values in history.history.items()}]
