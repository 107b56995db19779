"""The model is whole after anything: errors, Ctrl-C, a program that fails."""

import bridge  # isort: skip  # before keras: it chooses the backend

import gc
import signal
import weakref
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import optax
import pytest

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


def test_of_a_program_that_fails_on_the_device_the_error_says_what_is_lost() -> None:
    model = fresh(loss=failing_at(20))
    with pytest.raises(Exception, match="from the host") as caught:
        fit(model, epochs=3, fuse=4)
    assert any("Load its weights again" in note for note in caught.value.__notes__)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": keras.optimizers.Adam,
    "EMA": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True),
    "accumulation": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "OptaxOptimizer": lambda: bridge.OptaxOptimizer(optax.adam, learning_rate=1e-3),
}


class AtVariable:
    """Does something when Keras makes its n-th variable from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.acts = 0, dict[int, Callable[[], None]]()
        init = keras.Variable.__init__

        def counting(variable: Any, *args: Any, **kwargs: Any) -> None:
            init(variable, *args, **kwargs)
            self.made += 1
            self.acts.get(self.made, lambda: None)()

        monkeypatch.setattr(keras.Variable, "__init__", counting)

    def then(self, act: Callable[[], None], n: int) -> None:
        self.made, self.acts = 0, {n: act}


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_build_that_is_interrupted_at_any_variable_can_be_repeated(name, monkeypatch) -> None:
    variables, batch = AtVariable(monkeypatch), (X[:8], Y[:8])
    whole = fresh(optimizer=OPTIMIZERS[name]())
    variables.then(interrupt, 0)
    expected = bridge.keras_state(whole, batch)
    count = variables.made
    assert count >= len(whole.trainable_variables)
    for n in range(1, count + 1):
        model = fresh(optimizer=OPTIMIZERS[name]())
        variables.then(interrupt, n)
        with pytest.raises(KeyboardInterrupt):
            bridge.keras_state(model, batch)
        again = bridge.keras_state(model, batch)
        assert jax.tree.structure(again) == jax.tree.structure(expected), n
        jax.tree.map(np.testing.assert_array_equal, again, expected)


RUNS: dict[str, Callable[[keras.Model], Any]] = {
    "fit": lambda model: bridge.fit(model, X, Y, verbose=0),
    "fit with evaluations": lambda model: fit(model, validation_data=(X, Y)),
    "evaluate": lambda model: bridge.evaluate(model, X, Y, verbose=0),
    "predict": lambda model: bridge.predict(model, X, verbose=0),
}
EACH_RUN = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@EACH_RUN
def test_the_arrays_of_a_run_do_not_wait_for_the_garbage_collector(run) -> None:
    model = fresh()
    run(model)
    gc.collect()
    before = len(jax.live_arrays())
    gc.disable()
    try:
        run(model)
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()


def test_ctrl_c_ends_the_evaluation_of_a_stopped_fit(ctrl_c) -> None:
    batches: list[int] = []

    def interrupt(batch: int, logs: Any) -> None:
        batches.append(batch)
        signal.raise_signal(signal.SIGINT)

    def stop(batch: int, logs: Any) -> None:
        callback.model.stop_training = True

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    callback.on_test_batch_end = interrupt
    with pytest.raises(KeyboardInterrupt):
        fit(fresh(), callbacks=[callback], validation_data=(X, Y))
    assert batches == [0]


@EACH_RUN
def test_the_optimizer_of_before_a_second_compile_is_free_to_go(run: Any) -> None:
    model = fresh()
    model.optimizer.build(model.trainable_variables)
    run(model)
    before = [weakref.ref(x) for x in (model.optimizer, model.optimizer.variables[-1])]
    model.compile("sgd", "mse")
    gc.collect()
    assert [ref() for ref in before] == [None, None]


def test_a_model_is_free_to_go() -> None:
    model = fresh()
    fit(model, epochs=1)
    before = weakref.ref(model)
    del model
    gc.collect()
    assert before() is None


def test_a_step_is_traced_once_for_each_shape_until_the_model_is_compiled_again() -> None:
    traced = []

    class Counting(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            traced.append(data[0].shape)
            return super().train_step(state, data)

    model = Counting([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    for _ in range(3):
        bridge.fit(model, X[:100], Y[:100], batch_size=8, epochs=3, verbose=0, fuse=5)
    assert sorted(traced) == [(4, 8), (8, 8)]
    model.compile("sgd", "mae")
    fit(model)
    assert len(traced) > 2
