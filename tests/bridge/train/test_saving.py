"""bridge.fit with a checkpointer: killed and gone on with, it is Keras's own fit in one go."""

import bridge  # isort: skip  # before keras: it chooses the backend

import pathlib
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grain
import keras
import numpy as np
import pytest
from keras import layers

import functrain as ft
from tests.bridge.fitting import assert_same

RNG = np.random.default_rng(0)
X = RNG.normal(size=(83, 6)).astype(np.float32)
Y = (X[:, :1] > 0).astype(np.float32)
IMAGES = RNG.normal(size=(43, 6, 6, 2)).astype(np.float32)
LABELS = RNG.integers(0, 3, 43).astype(np.int32)
EPOCHS = 4


class Interrupted(Exception):  # noqa: N818  # it is none of the errors that are meant
    """Stands for whatever ends a process."""


class Interrupt(keras.callbacks.Callback):
    """Ends a fit in the midst of an epoch."""

    chunk_safe = True

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise Interrupted


def dense(width: int = 8, **compiled: Any) -> keras.Model:
    net = [layers.Dense(width, "relu"), layers.Dropout(0.3), layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((6,)), *net, layers.Dense(1, "sigmoid")])
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    how = {"optimizer": keras.optimizers.Adam(1e-2), "loss": "binary_crossentropy"}
    model.compile(**{**how, "metrics": metrics, **compiled})
    return model


def augmented() -> keras.Model:
    net = [layers.RandomFlip(), layers.GaussianNoise(0.1), layers.Conv2D(4, 3)]
    rest = [layers.BatchNormalization(), layers.Flatten(), layers.Dense(3)]
    model = keras.Sequential([keras.Input((6, 6, 2)), *net, *rest])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def with_ema() -> keras.Model:
    return dense(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True))


def half() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "gelu", dtype="mixed_bfloat16"), layers.Dense(1)]
    )
    model.compile("adamw", "mse", metrics=["mae"])
    return model


def plain() -> dict[str, Any]:
    return {}


def evaluated() -> dict[str, Any]:
    return {"validation_split": 0.25}


def stopping() -> dict[str, Any]:
    """Callbacks that remember, and stop before the end."""
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.1),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
        keras.callbacks.EarlyStopping(
            "val_loss", patience=1, min_delta=0.05, restore_best_weights=True
        ),
    ]
    return {"validation_split": 0.25, "callbacks": callbacks}


def in_batches() -> dict[str, Any]:
    return {"shuffle": "batch"}


def unshuffled() -> dict[str, Any]:
    return {"shuffle": False, "class_weight": {0: 1.0, 1: 2.0}}


def over_epochs() -> dict[str, Any]:
    """One iterator for all epochs: nine batches in the data, two of them in an epoch."""
    return {"steps_per_epoch": 2}


CASES = [
    pytest.param(dense, evaluated, marks=pytest.mark.long),
    pytest.param(dense, stopping, marks=pytest.mark.long),
    pytest.param(dense, in_batches, marks=pytest.mark.long),
    pytest.param(dense, unshuffled, marks=pytest.mark.long),
    (dense, over_epochs),
    pytest.param(augmented, plain, marks=pytest.mark.long),
    pytest.param(with_ema, evaluated, marks=pytest.mark.long),
    pytest.param(half, plain, marks=pytest.mark.long),
]
Build, Arguments = Callable[[], keras.Model], Callable[[], dict[str, Any]]


def fit(make: Build, arguments: Arguments, way: Any = bridge.fit, **more: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = make()
    keras.utils.set_random_seed(1)
    x, y = (IMAGES, LABELS) if make is augmented else (X, Y)
    how = {"batch_size": 10, "epochs": EPOCHS, "verbose": 0, **arguments()}
    how["callbacks"] = [*how.get("callbacks", []), *more.pop("callbacks", [])]
    if way is bridge.fit:
        how["rewrites"] = "exact"
    return model, way(model, x, y, **how, **more)


def fit_in_pieces(
    make: Build, arguments: Arguments, directory: pathlib.Path, when: Any, pieces: list[Any]
) -> Any:
    """Fits until it is interrupted, and again, with other steps per program each time."""
    for batches, fuse in pieces:
        checkpoints = ft.Checkpointer(directory, every=when)
        callbacks = [Interrupt(batches)] if batches else []
        try:
            found = fit(make, arguments, fuse=fuse, checkpointer=checkpoints, callbacks=callbacks)
        except Interrupted:
            assert batches
        else:
            assert not batches, "it was over before the interruption"
    return found


@pytest.mark.parametrize(("make", "arguments"), CASES, ids=lambda f: f.__name__)
def test_interrupted_twice_it_equals_keras_fit_to_the_bit(make, arguments, tmp_path) -> None:
    model, history = fit(make, arguments, keras.Model.fit)
    pieces = (
        [(5, 2), (2, 3), (None, 4)] if arguments is over_epochs else [(9, 2), (6, 3), (None, 4)]
    )
    again, found = fit_in_pieces(make, arguments, tmp_path, ft.every(steps=2), pieces)
    assert_same(again, model)
    assert (found.history, found.epoch) == (history.history, history.epoch)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.long
def test_it_goes_on_from_the_end_of_an_epoch_too(steps, tmp_path) -> None:
    model, history = fit(augmented, plain, keras.Model.fit)  # five batches an epoch
    pieces = [(11, 5), (None, 2)]
    again, found = fit_in_pieces(augmented, plain, tmp_path, ft.every(steps=steps), pieces)
    assert_same(again, model)
    assert found.history == history.history


def test_a_batch_that_was_fetched_ahead_of_a_checkpoint_keeps_its_order(tmp_path) -> None:
    def in_later_epochs() -> dict[str, Any]:
        return {"shuffle": "batch", "steps_per_epoch": 3}  # the ninth batch is smaller

    model, _ = fit(dense, in_later_epochs, keras.Model.fit)
    # Unforeseen, as by a signal: no chunk ends for it.
    at_eight = SimpleNamespace(next_step=lambda step: None, due=lambda step, *_: step == 8)
    pieces = [(9, 3), (None, 3)]
    again, _ = fit_in_pieces(dense, in_later_epochs, tmp_path, at_eight, pieces)
    assert_same(again, model)


def test_saved_at_the_ends_of_epochs_it_repeats_the_rest_of_one(tmp_path) -> None:
    model, history = fit(dense, evaluated, keras.Model.fit)
    pieces = [(10, 3), (None, 2)]
    again, found = fit_in_pieces(dense, evaluated, tmp_path, None, pieces)
    assert_same(again, model)
    assert found.history == history.history


class Steps(keras.callbacks.Callback):
    """Notes how many steps a model has taken when an epoch begins."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self.trained = model  # which no attribute of Keras's brings up to date

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(int(self.trained.optimizer.iterations.value))


@pytest.mark.parametrize(
    ("every", "seen"), [(ft.every(epochs=1), [9, 18, 27]), (ft.every(steps=4), [12, 18, 27])]
)
def test_callbacks_see_the_restored_model_when_an_epoch_begins(every, seen, tmp_path) -> None:
    steps, checkpoints = Steps(), ft.Checkpointer(tmp_path, every=every)
    with pytest.raises(Interrupted):
        fit(dense, plain, checkpointer=checkpoints, callbacks=[Interrupt(14)])
    fit(dense, plain, checkpointer=ft.Checkpointer(tmp_path, every=every), callbacks=[steps])
    assert steps.seen == seen


def test_a_fit_that_is_over_says_so_and_gives_its_model_and_history_back(tmp_path, capsys) -> None:
    checkpoints = ft.Checkpointer(tmp_path)
    model, history = fit(dense, stopping, checkpointer=checkpoints)
    assert len(history.epoch) < EPOCHS  # it was stopped, and the best weights are in the model
    assert capsys.readouterr().out == ""
    loudly = lambda: {**stopping(), "verbose": 2}  # noqa: E731
    again, found = fit(dense, loudly, checkpointer=checkpoints)
    assert capsys.readouterr().out.startswith("already finished, stopped early after ")
    assert_same(again, model)
    assert (found.history, found.epoch) == (history.history, history.epoch)
    assert again.history is found


@pytest.mark.long
def test_more_epochs_go_on_from_a_fit_that_is_over(tmp_path) -> None:
    checkpoints = ft.Checkpointer(tmp_path)
    fit(with_ema, lambda: {"epochs": 2}, checkpointer=checkpoints)
    again, found = fit(with_ema, lambda: {"epochs": 5}, checkpointer=checkpoints)
    model, history = fit(with_ema, lambda: {"epochs": 5}, keras.Model.fit)
    assert_same(again, model)
    assert found.history == history.history


def test_a_csv_file_goes_on_without_a_row_too_many(tmp_path) -> None:
    loggers: list[Any] = []

    def logged(name: str) -> Arguments:
        def arguments() -> dict[str, Any]:
            loggers.append(keras.callbacks.CSVLogger(str(tmp_path / name)))
            return {**evaluated(), "callbacks": loggers[-1:]}

        return arguments

    fit(dense, logged("straight.csv"), keras.Model.fit)
    fit_in_pieces(
        dense, logged("pieces.csv"), tmp_path / "c", ft.every(steps=3), [(17, 2), (9, 3), (None, 5)]
    )
    for logger in loggers:
        logger.csv_file.close()  # Keras leaves it open where a fit is interrupted
    assert (tmp_path / "pieces.csv").read_text() == (tmp_path / "straight.csv").read_text()


def test_a_csv_file_begins_anew_in_a_later_fit_that_does_not_resume(tmp_path) -> None:
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    for epochs in (1, 2):
        checkpoints, callbacks = ft.Checkpointer(tmp_path / "c"), [logger]
        fit(dense, lambda n=epochs: {"epochs": n}, checkpointer=checkpoints, callbacks=callbacks)
    fit(dense, lambda: {"epochs": 1}, callbacks=[logger])
    header, row = (tmp_path / "log.csv").read_text().splitlines()
    assert header.startswith("epoch,")
    assert row.startswith("0,")


def test_a_csv_file_keeps_its_columns_where_later_rows_have_others(tmp_path) -> None:
    def logged(name: str, epochs: int) -> Arguments:
        def arguments() -> dict[str, Any]:
            plateau = keras.callbacks.ReduceLROnPlateau("loss")
            logger = keras.callbacks.CSVLogger(tmp_path / name)
            how = {"validation_freq": 2, "callbacks": [plateau, logger]}  # val_loss comes later
            return {**evaluated(), **how, "epochs": epochs}

        return arguments

    fit(dense, logged("straight.csv", 2), keras.Model.fit)
    for epochs in (1, 2):
        fit(dense, logged("pieces.csv", epochs), checkpointer=ft.Checkpointer(tmp_path / "c"))
    assert (tmp_path / "pieces.csv").read_text() == (tmp_path / "straight.csv").read_text()


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


@pytest.mark.parametrize(
    ("method", "is_large"),
    [
        ("on_test_batch_end", True),
        ("on_test_end", False),
        pytest.param("on_test_batch_end", False, marks=pytest.mark.long),
        pytest.param("on_test_end", True, marks=pytest.mark.long),
    ],
)
def test_ctrl_c_in_an_evaluation_saves_what_training_had(
    method, is_large, tmp_path, monkeypatch, ctrl_c
) -> None:
    def two_epochs() -> dict[str, Any]:
        return {**evaluated(), "epochs": 2}

    model, history = fit(dense, two_epochs, keras.Model.fit)
    if is_large:
        monkeypatch.setattr("bridge.train._model_values.SPARE_BYTES", 0)
    checkpoints = ft.Checkpointer(tmp_path, every=ft.every(steps=1000))
    with pytest.raises(KeyboardInterrupt):
        fit(dense, two_epochs, checkpointer=checkpoints, callbacks=[Signalled(method)])
    assert checkpoints.latest() == 7
    again, found = fit(dense, two_epochs, checkpointer=checkpoints)
    assert_same(again, model)
    assert found.history == history.history


def test_ctrl_c_in_an_evaluation_saves_callbacks_as_they_were_before_it(tmp_path, ctrl_c) -> None:
    def swapped() -> dict[str, Any]:
        # It swaps the weights when an evaluation begins, and again when it ends.
        swap = keras.callbacks.SwapEMAWeights()
        return {**evaluated(), "epochs": 2, "callbacks": [swap]}

    model, history = fit(with_ema, swapped, keras.Model.fit)
    checkpoints, callbacks = ft.Checkpointer(tmp_path), [Signalled("on_test_batch_end")]
    with pytest.raises(KeyboardInterrupt):
        fit(with_ema, swapped, checkpointer=checkpoints, callbacks=callbacks)
    again, found = fit(with_ema, swapped, checkpointer=checkpoints)
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


def test_a_fit_with_nothing_left_ends_with_the_logs_of_its_last_epoch(tmp_path, ctrl_c) -> None:
    def interrupt(epoch: int, logs: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    seen: list[dict[str, Any]] = []
    checkpoints = ft.Checkpointer(tmp_path)
    interrupting = keras.callbacks.LambdaCallback(on_epoch_end=interrupt)
    reading = keras.callbacks.LambdaCallback(on_train_end=seen.append)
    with pytest.raises(KeyboardInterrupt):
        fit(dense, lambda: {"epochs": 1}, checkpointer=checkpoints, callbacks=[interrupting])
    _, history = fit(dense, lambda: {"epochs": 1}, checkpointer=checkpoints, callbacks=[reading])
    assert seen == [{name: values[-1] for name, values in history.history.items()}]


def test_sigterm_that_a_handler_takes_saves_once_and_the_fit_goes_on(tmp_path) -> None:
    class Terminated(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if not epoch:
                signal.raise_signal(signal.SIGTERM)

    taken: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
    try:
        checkpoints = ft.Checkpointer(tmp_path, every=ft.every(steps=1000))
        fit(dense, plain, checkpointer=checkpoints, callbacks=[Terminated()])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert taken == [signal.SIGTERM]
    assert checkpoints.steps() == [9, 9 * EPOCHS]


class Counter(keras.callbacks.Callback):
    """A user's callback that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs, self.means = 0, []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1
        self.means.append(np.float32(logs["loss"]))

    def state(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "means": np.array(self.means)}

    def restore(self, state: dict[str, Any]) -> None:
        self.epochs, self.means = state["epochs"], list(state["means"])


def test_callbacks_of_users_go_on_where_they_say_how(tmp_path) -> None:
    counters: list[Counter] = []

    def counted() -> dict[str, Any]:
        counters.append(Counter())
        return {"callbacks": [counters[-1]]}

    fit(dense, counted, keras.Model.fit)
    fit_in_pieces(dense, counted, tmp_path, ft.every(steps=4), [(15, 3), (None, 2)])
    assert counters[-1].epochs == counters[0].epochs == EPOCHS
    assert counters[-1].means == counters[0].means


def test_callbacks_resume_with_their_own_memory_in_any_order(tmp_path) -> None:
    def watching() -> list[Any]:
        return [keras.callbacks.EarlyStopping(name, patience=9) for name in ("loss", "accuracy")]

    first, second = watching()
    fit(
        dense,
        lambda: {"epochs": 2},
        checkpointer=ft.Checkpointer(tmp_path),
        callbacks=[first, second],
    )
    again, other = watching()
    memory = {}

    class Remembered(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            memory.setdefault(epoch, (again.best, other.best))

    callbacks = [other, again, Remembered()]
    fit(dense, lambda: {"epochs": 3}, checkpointer=ft.Checkpointer(tmp_path), callbacks=callbacks)
    assert memory[2] == (first.best, second.best)


def test_callbacks_that_could_be_mixed_up_are_refused(tmp_path) -> None:
    callbacks = [keras.callbacks.EarlyStopping("loss", patience=n) for n in (1, 2)]
    with pytest.raises(ValueError, match=r"callbacks: expected .* got EarlyStopping\(loss\) twice"):
        fit(dense, plain, checkpointer=ft.Checkpointer(tmp_path), callbacks=callbacks)
    quiet = [keras.callbacks.LambdaCallback(), keras.callbacks.LambdaCallback()]
    fit(dense, lambda: {"epochs": 1}, checkpointer=ft.Checkpointer(tmp_path), callbacks=quiet)


def test_the_best_of_some_batches_is_still_known(tmp_path) -> None:
    def saved(name: str) -> Arguments:
        def arguments() -> dict[str, Any]:
            path = tmp_path / name / "{epoch}-{batch}.weights.h5"
            how = {"save_freq": 6, "save_best_only": True, "save_weights_only": True}
            return {"callbacks": [keras.callbacks.ModelCheckpoint(path, "loss", **how)]}

        return arguments

    fit(dense, saved("straight"), keras.Model.fit)  # saves once before it can compare
    fit_in_pieces(dense, saved("pieces"), tmp_path / "c", ft.every(steps=10), [(11, 2), (None, 3)])
    straight, pieces = (
        sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("straight", "pieces")
    )
    assert pieces == straight


def test_generators_are_begun_anew_with_a_warning(tmp_path) -> None:
    def batches() -> Any:
        while True:
            for i in range(0, 80, 10):
                yield X[i : i + 10], Y[i : i + 10]

    def run(way: Any = bridge.fit, **more: Any) -> Any:
        keras.utils.set_random_seed(0)
        model = dense()
        how = {"steps_per_epoch": 5, "epochs": EPOCHS, "verbose": 0, "shuffle": False}
        return model, way(model, batches(), **how, **more)

    model, history = run(keras.Model.fit)
    checkpoints = ft.Checkpointer(tmp_path, every=ft.every(steps=3))
    how = {"rewrites": "exact", "checkpointer": checkpoints}
    with pytest.raises(Interrupted):
        run(fuse=2, callbacks=[Interrupt(13)], **how)
    with pytest.warns(UserWarning, match="only arrays are known to give the same batches"):
        again, found = run(**how)
    assert_same(again, model)
    assert found.history == history.history


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_of_unknown_length_resume_in_a_later_epoch(tmp_path) -> None:
    def run(way: Any = bridge.fit, **more: Any) -> Any:
        keras.utils.set_random_seed(0)
        model = dense()
        rows = list(zip(X[:80], Y[:80], strict=True))
        data = grain.MapDataset.source(rows).batch(10)
        return model, way(model, data, epochs=3, verbose=0, shuffle=False, **more)

    model, history = run(keras.Model.fit)
    how = {"rewrites": "exact", "checkpointer": ft.Checkpointer(tmp_path)}
    with pytest.raises(Interrupted):
        run(callbacks=[Interrupt(13)], **how)
    with pytest.warns(UserWarning, match="only arrays are known to give the same batches"):
        again, found = run(**how)
    assert_same(again, model)
    assert found.history == history.history
    _, finished = run(**how)
    assert finished.history == history.history


def test_a_generator_that_ends_before_the_checkpoint_is_refused(tmp_path) -> None:
    def run(batches: int, epochs: int) -> None:
        data = ((X[:10], Y[:10]) for _ in range(batches))
        how = {"steps_per_epoch": 5, "epochs": epochs, "shuffle": False, "verbose": 0}
        bridge.fit(dense(), data, checkpointer=ft.Checkpointer(tmp_path), **how)

    run(batches=10, epochs=1)
    with pytest.raises(ValueError, match=r"x: expected the 5 batches .*, got 3"):
        run(batches=3, epochs=2)


def test_an_iterator_to_evaluate_on_is_begun_anew_with_a_warning(tmp_path) -> None:
    def evaluated_on(epochs: int) -> Arguments:
        batches = ((X[i : i + 10], Y[i : i + 10]) for i in range(0, 80, 10))
        return lambda: {"validation_data": batches, "validation_steps": 2, "epochs": epochs}

    fit(dense, evaluated_on(1), checkpointer=ft.Checkpointer(tmp_path))
    with pytest.warns(UserWarning, match="validation_data: expected arrays.* got an iterator"):
        fit(dense, evaluated_on(2), checkpointer=ft.Checkpointer(tmp_path))


def other_width() -> keras.Model:
    return dense(width=9)


def other_optimizer() -> keras.Model:
    return dense(optimizer="sgd")


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (other_width, plain, r"(?s)trainable/0: saved float32\[6, 8\], expected float32\[6, 9\]"),
        (other_optimizer, plain, r"optimizer/10: not expected \(saved float32"),
        (dense, lambda: {"batch_size": 11}, r"batch_size: saved with 10, now 11"),
        (dense, lambda: {"shuffle": False}, r"shuffle: saved with True, now False"),
        (dense, evaluated, r"examples: saved with 83, now 62"),
    ],
)
def test_another_model_or_other_data_are_refused(make, arguments, message, tmp_path) -> None:
    checkpoints = ft.Checkpointer(tmp_path)
    fit(dense, plain, checkpointer=checkpoints)
    with pytest.raises(ft.CheckpointMismatchError, match=message):
        fit(make, arguments, checkpointer=checkpoints)
    model, _ = fit(dense, plain, checkpointer=checkpoints)  # nothing was overwritten
    assert model.optimizer.iterations == 36


class Predicts(keras.callbacks.Callback):
    """Predicts, which donates the model's arrays, where an epoch begins and where the fit ends."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.predict(X, verbose=0)

    def on_train_end(self, logs: Any = None) -> None:
        self.model.predict(X, verbose=0)


def predicts() -> dict[str, Any]:
    return {"callbacks": [Predicts()], "epochs": 2}


def test_callbacks_may_predict_in_a_resumed_epoch_and_at_the_end(tmp_path) -> None:
    model, _ = fit(dense, predicts, keras.Model.fit)
    pieces = [(5, 2), (None, 2)]
    again, _ = fit_in_pieces(dense, predicts, tmp_path, ft.every(steps=2), pieces)
    assert_same(again, model)
    finished, _ = fit(dense, predicts, checkpointer=ft.Checkpointer(tmp_path))
    assert_same(finished, model)


def test_it_refuses_a_second_backup(tmp_path) -> None:
    def both() -> dict[str, Any]:
        return {"callbacks": [keras.callbacks.BackupAndRestore(tmp_path / "b")]}

    with pytest.raises(ValueError, match="expected no BackupAndRestore beside checkpointer="):
        fit(dense, both, checkpointer=ft.Checkpointer(tmp_path / "c"))


def test_the_best_epoch_by_a_value_of_training_is_kept(tmp_path) -> None:
    def worse_each_epoch() -> dict[str, Any]:
        rates = keras.callbacks.LearningRateScheduler(lambda epoch: [0.0, 10.0, 10.0][epoch])
        return {"epochs": 3, "callbacks": [rates]}

    checkpoints = ft.Checkpointer(tmp_path, keep=1, monitor="loss")
    _, history = fit(lambda: dense(optimizer="sgd"), worse_each_epoch, checkpointer=checkpoints)
    losses = history.history["loss"]
    assert losses[0] == min(losses) < losses[-1]
    assert checkpoints.best() == 9
    assert checkpoints.steps() == [9, 27]


def test_a_best_value_that_nobody_reports_is_named_with_arguments_of_bridge_fit(tmp_path) -> None:
    message = r"expected one of \['accuracy', 'auc', 'loss'\], got 'val_loss'.* validation_data="
    checkpoints = ft.Checkpointer(tmp_path, monitor="val_loss")
    with pytest.warns(UserWarning, match=message):
        fit(dense, lambda: {"epochs": 1}, checkpointer=checkpoints)
