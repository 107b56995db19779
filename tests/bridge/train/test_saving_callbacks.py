"""Callbacks of an interrupted bridge.fit: they go on with their own memory and files."""

from typing import Any

import keras
import numpy as np
import pytest

import functrain as ft
from tests.bridge.fitting import assert_same
from tests.bridge.train.interrupting import (
    EPOCHS,
    Arguments,
    Interrupt,
    Interrupted,
    X,
    dense,
    evaluated,
    fit,
    fit_in_pieces,
    plain,
)


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
