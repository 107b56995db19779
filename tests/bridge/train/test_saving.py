"""bridge.fit with a checkpointer: killed and gone on with, it is Keras's own fit in one go."""

import bridge  # isort: skip  # before keras: it chooses the backend

from types import SimpleNamespace
from typing import Any

import grain
import keras
import pytest

import functrain as ft
from tests.bridge.fitting import assert_same
from tests.bridge.train.interrupting import (
    EPOCHS,
    Interrupt,
    Interrupted,
    X,
    Y,
    dense,
    evaluated,
    fit,
    fit_in_pieces,
    plain,
    stopping,
    with_ema,
)


def over_epochs() -> dict[str, Any]:
    """One iterator for all epochs: nine batches in the data, two of them in an epoch."""
    return {"steps_per_epoch": 2}


CASES = [
    pytest.param(dense, evaluated, marks=pytest.mark.long),
    pytest.param(dense, stopping, marks=pytest.mark.long),
    (dense, over_epochs),
    pytest.param(with_ema, evaluated, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("make", "arguments"), CASES, ids=lambda f: f.__name__)
def test_interrupted_twice_it_equals_keras_fit_to_the_bit(make, arguments, tmp_path) -> None:
    model, history = fit(make, arguments, keras.Model.fit)
    pieces = (
        [(5, 2), (2, 3), (None, 4)] if arguments is over_epochs else [(9, 2), (6, 3), (None, 4)]
    )
    again, found = fit_in_pieces(make, arguments, tmp_path, ft.every(steps=2), pieces)
    assert_same(again, model)
    assert (found.history, found.epoch) == (history.history, history.epoch)


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


def test_fewer_epochs_than_a_fit_has_had_are_refused_before_the_callbacks(tmp_path) -> None:
    checkpoints, began = ft.Checkpointer(tmp_path), []
    fit(dense, lambda: {"epochs": 2}, checkpointer=checkpoints)
    callback = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: began.append(logs))
    with pytest.raises(ValueError, match=r"more than the 1 that are over .* got 1"):
        fit(dense, lambda: {"epochs": 1}, checkpointer=checkpoints, callbacks=[callback])
    assert not began


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


def other_width() -> keras.Model:
    return dense(width=9)


def other_optimizer() -> keras.Model:
    return dense(optimizer="sgd")


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (other_width, plain, r"(?s)trainable/0: expected float32\[6, 9\], got float32\[6, 8\]"),
        (other_optimizer, plain, r"optimizer/10: unexpected \(got float32"),
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
