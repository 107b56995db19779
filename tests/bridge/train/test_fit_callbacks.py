"""Callbacks around fused steps: who is called, when, with what, and what their edits do."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import keras
import numpy as np
import pytest
from keras.callbacks import Callback, CallbackList, LambdaCallback, ModelCheckpoint

from bridge.train._callbacks import BatchCallbacks
from tests.bridge.fitting import Sizes, X, Y, assert_same, fit, fresh


class Recorder(Callback):
    """Everything it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self.noting(name, found) if name in RECORDED else found

    def noting(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            found = [*args, *kwargs.values()]
            step = next((a for a in found if isinstance(a, int)), None)
            logs = next((a for a in found if isinstance(a, dict)), None) or {}
            self.calls.append((name, step, sorted(logs.items())))

        return call


RECORDED = {
    f"on_{kind}_{when}" for kind in ("train", "test", "epoch") for when in ("begin", "end")
} | {f"on_{kind}_batch_{when}" for kind in ("train", "test") for when in ("begin", "end")}


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("fuse", ["auto", 1, 5])
def test_callbacks_are_called_as_keras_calls_them(fuse: Any, steps_per_execution: int) -> None:
    ours, theirs = Recorder(), Recorder()
    kwargs = {"validation_data": (X[:40], Y[:40])}
    how = {"steps_per_execution": steps_per_execution}
    fit(fresh(**how), keras.Model.fit, callbacks=[theirs], **kwargs)
    fit(fresh(**how), callbacks=[ours], fuse=fuse, **kwargs)
    assert ours.calls == theirs.calls


@pytest.mark.parametrize(
    ("fuse", "is_chunk_safe", "seen"),
    [
        ("auto", False, [*range(1, 14)]),
        ("auto", True, [13] * 13),
        (5, False, [5] * 5 + [10] * 5 + [13] * 3),
    ],
)
def test_a_users_batch_callback_takes_one_step_at_a_time_unless_it_is_chunk_safe(
    fuse: Any, is_chunk_safe: bool, seen: list[int]
) -> None:
    sizes = Sizes()
    sizes.chunk_safe = is_chunk_safe
    fit(fresh(), callbacks=[sizes], epochs=1, fuse=fuse)
    assert sizes.seen == seen


class Later(ModelCheckpoint):
    """A user's that keeps the batch methods of Keras."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)


class Sooner(ModelCheckpoint):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)


class Listed(CallbackList):
    """May hold anything."""


@pytest.mark.parametrize(
    ("callback", "is_fusible"),
    [
        (Callback(), True),
        (LambdaCallback(on_epoch_end=lambda epoch, logs: None), True),
        (ModelCheckpoint("x.keras", save_freq=5), True),
        (Later("x.keras", save_freq=5), True),
        (Sooner("x.keras", save_freq=5), False),
        (LambdaCallback(on_train_batch_end=lambda batch, logs: None), False),
    ],
)
def test_steps_are_fused_around_callbacks_that_leave_batches_alone_or_are_keras_s_own(
    callback: Any, is_fusible: bool
) -> None:
    callbacks = CallbackList([callback], model=fresh())
    assert BatchCallbacks(callbacks, "train").fusible == is_fusible
    assert not BatchCallbacks(Listed([callback], model=fresh()), "train").fusible


class Halves(Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        optimizer.learning_rate = 0.5 * float(optimizer.learning_rate)
        kernel = self.model.layers[0].kernel
        kernel.assign(0.5 * kernel.value)


@pytest.mark.smoke
def test_edits_of_a_batch_callback_are_those_of_keras() -> None:
    ours, theirs = fresh(), fresh()
    fit(theirs, keras.Model.fit, callbacks=[Halves()])
    fit(ours, callbacks=[Halves()])
    assert_same(ours, theirs)


def test_stop_training_holds_from_the_next_chunk_on() -> None:
    class Stops(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                self.model.stop_training = True

    model = fresh()
    fit(model, callbacks=[Stops()], fuse=5)
    assert int(model.optimizer.iterations.value) == 5


def test_predict_calls_callbacks_with_the_outputs_of_their_batch() -> None:
    model, seen = fresh(), []

    class Sees(Callback):
        chunk_safe = True

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((batch, logs["outputs"]))

    outputs = bridge.predict(model, X, batch_size=16, callbacks=[Sees()], verbose=0)
    assert [batch for batch, _ in seen] == list(range(7))
    np.testing.assert_array_equal(np.concatenate([x for _, x in seen]), outputs)


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("when", ["on_train_begin", "on_epoch_begin"])
def test_a_stop_before_the_first_batch_leaves_as_many_steps_as_keras_takes(
    when: str, steps_per_execution: int
) -> None:
    class Stop(Callback):
        pass

    setattr(Stop, when, lambda self, *_, **__: setattr(self.model, "stop_training", True))
    ours, theirs = (fresh(steps_per_execution=steps_per_execution) for _ in range(2))
    fit(theirs, keras.Model.fit, callbacks=[Stop()])
    fit(ours, callbacks=[Stop()])
    assert_same(ours, theirs)
    assert int(ours.optimizer.iterations.value) == steps_per_execution


def test_a_stop_can_be_taken_back_at_the_end_of_the_epoch() -> None:
    class Short(Callback):
        """Ends every epoch after its fourth batch."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 3

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = False

    ours, theirs = fresh(), fresh()
    fit(theirs, keras.Model.fit, callbacks=[Short()])
    fit(ours, callbacks=[Short()])
    assert_same(ours, theirs)
    assert int(ours.optimizer.iterations.value) == 8


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_epoch_without_batches_reports_what_the_one_before_did() -> None:
    histories = []
    for way in (bridge.fit, keras.Model.fit):
        batches = ((X[8 * i :][:8], Y[8 * i :][:8]) for i in range(4))
        kwargs = {"steps_per_epoch": 4, "epochs": 2, "verbose": 0, "shuffle": False}
        exact = {"rewrites": "exact"} if way is bridge.fit else {}
        histories.append(way(fresh(), batches, **kwargs, **exact).history)
    assert histories[0] == histories[1]
    assert len(histories[0]["loss"]) == 2


def test_no_epochs_call_callbacks_as_keras_does() -> None:
    ours, theirs = Recorder(), Recorder()
    one, other = (fresh(optimizer=keras.optimizers.SGD(use_ema=True)) for _ in range(2))
    fit(other, keras.Model.fit, callbacks=[theirs], epochs=0)
    history = fit(one, callbacks=[ours], epochs=0)
    assert ours.calls == theirs.calls
    assert history.history == {}
    assert_same(one, other)
