"""Callbacks around fused steps: who is called, when, with what, and what their edits do."""

import bridge  # isort: skip  # before keras: it chooses the backend

import pathlib
import signal
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers

RNG = np.random.default_rng(0)
X = RNG.normal(size=(104, 8)).astype(np.float32)
Y = RNG.normal(size=(104, 4)).astype(np.float32)


def fresh(**compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu"), layers.Dense(4)])
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **compiled})
    return model


def values(model: keras.Model) -> list[Any]:
    return [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]


def assert_same(a: keras.Model, b: keras.Model) -> None:
    for one, other in zip(values(a), values(b), strict=True):
        np.testing.assert_array_equal(one, other)


def fit(model: keras.Model, way: Any = bridge.fit, **kwargs: Any) -> Any:
    if way is bridge.fit:
        kwargs.setdefault("rewrites", "exact")
    defaults = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    return way(model, X, Y, **{**defaults, **kwargs})


class Recorder(keras.callbacks.Callback):
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


class Sizes(keras.callbacks.Callback):
    """Counts the optimizer's steps at the end of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(int(self.model.optimizer.iterations.value))


def test_auto_takes_one_step_at_a_time_for_a_users_batch_callback() -> None:
    sizes = Sizes()
    fit(fresh(), callbacks=[sizes], epochs=1)
    assert sizes.seen == list(range(1, 14))


def test_a_chunk_safe_callback_is_called_for_every_batch_after_its_chunk() -> None:
    sizes = Sizes()
    sizes.chunk_safe = True
    fit(fresh(), callbacks=[sizes], epochs=1)
    assert sizes.seen == [13] * 13


def test_an_explicit_k_wins_over_a_users_batch_callback() -> None:
    sizes = Sizes()
    fit(fresh(), callbacks=[sizes], epochs=1, fuse=5)
    assert sizes.seen == [5] * 5 + [10] * 5 + [13] * 3


class Halves(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        optimizer.learning_rate = 0.5 * float(optimizer.learning_rate)
        kernel = self.model.layers[0].kernel
        kernel.assign(0.5 * kernel.value)


def test_edits_of_a_batch_callback_are_those_of_keras() -> None:
    ours, theirs = fresh(), fresh()
    fit(theirs, keras.Model.fit, callbacks=[Halves()])
    fit(ours, callbacks=[Halves()])
    assert_same(ours, theirs)


def test_functions_of_a_lambda_callback_see_and_set_the_weights_of_their_batch() -> None:
    model, seen = fresh(), []

    def end(batch: int, logs: Any) -> None:
        seen.append(np.asarray(model.layers[0].bias.value).sum())
        model.layers[0].bias.assign(np.zeros(8))

    fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=end)], epochs=1)
    assert len(set(seen)) == 13
    assert not np.asarray(model.layers[0].bias.value).any()


@pytest.mark.parametrize("every", ["epoch", 4, 7])
def test_model_checkpoint_writes_what_keras_writes(every: Any, tmp_path: pathlib.Path) -> None:
    for name, way in (("theirs", keras.Model.fit), ("ours", bridge.fit)):
        path = tmp_path / name / "{epoch}-{batch}.weights.h5"
        if every == "epoch":
            path = tmp_path / name / "{epoch}.weights.h5"
        save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=every)
        fit(fresh(), way, callbacks=[save])
    files = sorted(file.name for file in (tmp_path / "theirs").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "ours").iterdir())
    for file in files:
        a, b = fresh(), fresh()
        for model in (a, b):
            model.optimizer.build(model.trainable_variables)
        a.load_weights(tmp_path / "theirs" / file)
        b.load_weights(tmp_path / "ours" / file)
        assert_same(a, b)


def test_chunks_end_where_a_checkpoint_is_due(tmp_path: pathlib.Path) -> None:
    sizes = Sizes()
    path = tmp_path / "{batch}.weights.h5"
    save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=4)
    fit(fresh(), callbacks=[save, sizes], epochs=1, fuse=8)
    assert sizes.seen == [4] * 4 + [8] * 4 + [12] * 4 + [13]


@pytest.mark.parametrize("every", ["epoch", 5])
def test_backup_and_restore_goes_on_as_keras_does(every: Any, tmp_path: pathlib.Path) -> None:
    results = []
    for name, way in (("theirs", keras.Model.fit), ("ours", bridge.fit)):

        def backup(name: str = name) -> Any:
            return keras.callbacks.BackupAndRestore(tmp_path / name, save_freq=every)

        def fail(epoch: int, logs: Any) -> None:
            if epoch == 2:
                raise RuntimeError("stop")

        model = fresh()
        failing = keras.callbacks.LambdaCallback(on_epoch_begin=fail)
        with pytest.raises(RuntimeError, match="stop"):
            fit(model, way, callbacks=[backup(), failing], epochs=4)
        model = fresh()
        history = fit(model, way, callbacks=[backup()], epochs=4)
        results.append((model, history.history))
    assert results[0][1] == results[1][1]
    assert_same(results[0][0], results[1][0])


def test_csv_logger_writes_what_keras_writes(tmp_path: pathlib.Path) -> None:
    for name, way in (("theirs", keras.Model.fit), ("ours", bridge.fit)):
        fit(fresh(), way, callbacks=[keras.callbacks.CSVLogger(tmp_path / name)])
    assert (tmp_path / "ours").read_text() == (tmp_path / "theirs").read_text()


def test_terminate_on_nan_ends_the_fit() -> None:
    model = fresh(optimizer=keras.optimizers.SGD(1e30))
    history = fit(model, callbacks=[keras.callbacks.TerminateOnNaN()], epochs=5)
    assert len(history.history["loss"]) == 1


def test_stop_training_holds_from_the_next_chunk_on() -> None:
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                self.model.stop_training = True

    model = fresh()
    fit(model, callbacks=[Stops()], fuse=5)
    assert int(model.optimizer.iterations.value) == 5


def test_the_progress_bar_shows_what_keras_shows(capsys: pytest.CaptureFixture[str]) -> None:
    last = []
    for way in (keras.Model.fit, bridge.fit):
        fit(fresh(), way, verbose=2)
        last.append([line.split("/step")[1:] for line in capsys.readouterr().out.splitlines()])
    assert last[0] == last[1]


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


def test_fit_compiles_once_for_whole_batches_and_once_for_the_last() -> None:
    traces = []

    class Counts(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            traces.append(data[0].shape)
            return super().train_step(state, data)

    model = Counts([keras.Input((8,)), layers.Dense(4)])
    model.compile("adam", "mse")
    for _ in range(3):
        bridge.fit(model, X[:100], Y[:100], batch_size=8, epochs=3, verbose=0, fuse=5)
    assert sorted(traces) == [(4, 8), (8, 8)]


def test_compiling_anew_takes_effect() -> None:
    ours, theirs = fresh(), fresh()
    for found, way in ((ours, bridge.fit), (theirs, keras.Model.fit)):
        fit(found, way)
        found.layers[0].trainable = False
        found.compile("adam", "mse")
        fit(found, way)
        found.compile("sgd", "mae")
        fit(found, way)
    assert_same(ours, theirs)


def test_a_program_that_fails_on_the_device_leaves_the_model_as_the_epoch_found_it() -> None:
    def fails(loss: Any) -> Any:
        if int(fails.calls) >= 20:
            raise RuntimeError("from the host")
        fails.calls += 1
        return np.float32(loss)

    fails.calls = 0

    def loss(y: Any, p: Any) -> Any:
        found = keras.ops.mean(keras.ops.square(y - p), axis=-1)
        shape = jax.ShapeDtypeStruct((), np.float32)
        extra = jax.pure_callback(fails, shape, jax.lax.stop_gradient(found).mean())
        return found + 0 * extra

    model = fresh(loss=loss)
    with pytest.raises(Exception, match="from the host"):
        fit(model, epochs=3, fuse=4)
    assert int(model.optimizer.iterations.value) == 13
    assert all(np.isfinite(x).all() for x in values(model))


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_the_last_callback_is_not_forgotten() -> None:
    def end(epoch: int, logs: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    model = fresh()
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=end)], epochs=1)
    assert int(model.optimizer.iterations.value) == 13


def test_a_source_may_fill_one_buffer_again_and_again() -> None:
    def batches(*, fresh: bool) -> Any:
        x, y = np.empty_like(X[:8]), np.empty_like(Y[:8])
        for i in range(26):
            x[:], y[:] = X[8 * (i % 13) :][:8], Y[8 * (i % 13) :][:8]
            ahead = i < 2  # so many batches Keras takes before it begins
            yield (x.copy(), y.copy()) if fresh or ahead else (x, y)

    ours, theirs = fresh(), fresh()
    kwargs = {"steps_per_epoch": 13, "epochs": 2, "verbose": 0, "shuffle": False}
    bridge.fit(ours, batches(fresh=False), **kwargs, fuse=5, rewrites="exact")
    theirs.fit(batches(fresh=True), **kwargs)  # Keras itself reads such a buffer too late
    assert_same(ours, theirs)


def test_predict_calls_callbacks_with_the_outputs_of_their_batch() -> None:
    model, seen = fresh(), []

    class Sees(keras.callbacks.Callback):
        chunk_safe = True

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((batch, logs["outputs"]))

    outputs = bridge.predict(model, X, batch_size=16, callbacks=[Sees()], verbose=0)
    assert [batch for batch, _ in seen] == list(range(7))
    np.testing.assert_array_equal(np.concatenate([x for _, x in seen]), outputs)
