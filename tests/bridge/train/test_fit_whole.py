"""The model is whole after anything: errors, Ctrl-C, a program that fails."""

import bridge  # isort: skip  # before keras: it chooses the backend

import signal
from typing import Any

import jax
import keras
import numpy as np
import pytest

from bridge.train import _loop
from functrain.engine import _driver
from tests.bridge.fitting import X, Y, assert_same, fit, fresh, values


def test_a_callback_that_raises_leaves_the_model_whole_and_fit_can_go_on() -> None:
    ours, theirs = fresh(), fresh()

    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 4:
                raise RuntimeError("from the callback")

    for model, way in ((ours, bridge.fit), (theirs, keras.Model.fit)):
        with pytest.raises(RuntimeError, match="from the callback"):
            fit(model, way, callbacks=[Raises()])
    assert_same(ours, theirs)
    fit(ours, keras.Model.fit)
    fit(theirs, keras.Model.fit)
    assert_same(ours, theirs)


def test_an_error_in_the_data_leaves_the_model_whole() -> None:
    def batches() -> Any:
        for i in range(6):
            yield X[8 * i :][:8], Y[8 * i :][:8]
        raise RuntimeError("no more data")

    model, theirs = fresh(), fresh()
    with pytest.raises(RuntimeError, match="no more data"):
        bridge.fit(model, batches(), verbose=0, shuffle=False, fuse=4, rewrites="exact")
    with pytest.raises(RuntimeError, match="no more data"):
        theirs.fit(batches(), verbose=0, shuffle=False)
    assert_same(model, theirs)


def test_a_loss_that_cannot_be_traced_leaves_the_model_whole() -> None:
    model = fresh(loss=lambda y, p: float(keras.ops.mean(y - p)) * p)
    before = values(model)
    with pytest.raises(Exception, match=r"float|concrete|Concrete|Tracer|tracer|built|build"):
        fit(model)
    assert not any(isinstance(v.value, jax.core.Tracer) for v in model.variables)
    for a, b in zip(before[:4], values(model)[:4], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("kind", ["train", "test"])
def test_ctrl_c_leaves_the_model_whole(kind: str) -> None:
    class Interrupts(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and kind == "train":
                signal.raise_signal(signal.SIGINT)

        def on_test_begin(self, logs: Any = None) -> None:
            if kind == "test":
                signal.raise_signal(signal.SIGINT)

    model = fresh()
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[Interrupts()], epochs=3, validation_data=(X, Y), fuse=4)
    taken = int(model.optimizer.iterations.value)
    assert taken == (13 + 4 if kind == "train" else 13)
    fit(model, keras.Model.fit, epochs=1)
    assert int(model.optimizer.iterations.value) == taken + 13


def failing_at(call: int) -> Any:
    """A loss whose host callback raises from that call on."""
    calls = []

    def fails(loss: Any) -> Any:
        if len(calls) >= call:
            raise RuntimeError("from the host")
        calls.append(0)
        return np.float32(loss)

    def loss(y: Any, p: Any) -> Any:
        found = keras.ops.mean(keras.ops.square(y - p), axis=-1)
        shape = jax.ShapeDtypeStruct((), np.float32)
        extra = jax.pure_callback(fails, shape, jax.lax.stop_gradient(found).mean())
        return found + 0 * extra

    return loss


def test_a_program_that_fails_on_the_device_leaves_the_model_as_the_epoch_found_it() -> None:
    model = fresh(loss=failing_at(20))
    with pytest.raises(Exception, match="from the host"):
        fit(model, epochs=3, fuse=4)
    assert int(model.optimizer.iterations.value) == 13
    assert all(np.isfinite(x).all() for x in values(model))


def test_of_a_model_too_large_to_copy_the_error_says_what_is_lost(monkeypatch) -> None:
    monkeypatch.setattr(_driver, "SPARE_BYTES", 0)
    monkeypatch.setattr(_loop, "SPARE_BYTES", 0)
    trained, theirs = fresh(), fresh()
    fit(trained, epochs=2, fuse=4)
    fit(theirs, keras.Model.fit, epochs=2)
    assert_same(trained, theirs)  # without a copy, too
    model = fresh(loss=failing_at(20))
    with pytest.raises(Exception, match="from the host") as caught:
        fit(model, epochs=3, fuse=4)
    assert any("Load its weights again" in note for note in caught.value.__notes__)


def test_k_minds_the_slots_of_the_optimizer(monkeypatch) -> None:
    seen = []
    plan = _loop.Plan
    monkeypatch.setattr(_loop, "Plan", lambda *a, **how: seen.append(how) or plan(*a, **how))
    model = fresh()
    fit(model, epochs=1)
    held = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    assert seen[0]["state_bytes"] == sum(v.value.nbytes for v in {id(v): v for v in held}.values())


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_last_callback_is_not_forgotten() -> None:
    def end(epoch: int, logs: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    model = fresh()
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=end)], epochs=1)
    assert int(model.optimizer.iterations.value) == 13
