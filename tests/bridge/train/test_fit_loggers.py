"""Loggers of functrain in bridge.fit: TensorBoard without TensorFlow, and lines of JSON."""

import json
import pathlib
import sys
from typing import Any

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import functrain as ft
from tests.bridge.fitting import X, Y, fit, fresh


def scalars(folder: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """Returns what TensorBoard's own reader finds: steps and values by tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


class Batches(keras.callbacks.Callback):
    """Notes what each batch reports, and how many steps were taken; raises after some of them."""

    chunk_safe = True

    def __init__(self, until: int | None = None) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []
        self.steps: set[int] = set()
        self.until = until

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))
        self.steps.add(int(self.model.optimizer.iterations.value))
        if len(self.logs) == self.until:
            raise RuntimeError("interrupted")


DATA = {"validation_data": (X[:40], Y[:40])}


def test_tensorboard_needs_no_tensorflow_and_has_all_steps_and_epochs(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # its import fails
    batches = Batches()
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1)),
        batches,
        ft.hooks.TensorBoard(tmp_path, every=1),
    ]
    history = fit(fresh(), callbacks=callbacks, **DATA).history
    found = scalars(tmp_path)
    assert {"epoch/loss", "epoch/val_loss", "epoch/mae", "epoch/val_mae"} <= found.keys()
    for name, values in history.items():  # the learning rate as well
        assert found[f"epoch/{name}"] == [
            (13 * (i + 1), np.float32(x)) for i, x in enumerate(values)
        ]
    for name in ("loss", "mae"):
        steps = [(i + 1, np.float32(logs[name])) for i, logs in enumerate(batches.logs)]
        assert found[name] == steps
        assert len(steps) == 26


def test_each_so_many_steps_are_written_and_programs_are_as_long_as_without(tmp_path) -> None:
    batches = Batches()
    fit(fresh(), callbacks=[ft.hooks.TensorBoard(tmp_path, every=5), batches])
    assert [step for step, _ in scalars(tmp_path)["loss"]] == [5, 10, 15, 20, 25]
    assert batches.steps == {13, 26}


def accumulating() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(gradient_accumulation_steps=3)


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Adam,
        accumulating,
        lambda: keras.optimizers.LossScaleOptimizer(accumulating()),
    ],
    ids=["adam", "accumulation", "loss scale"],
)
def test_a_second_fit_of_a_model_continues_the_axis(optimizer: Any, tmp_path) -> None:
    model = fresh(optimizer=optimizer())
    for _ in range(2):
        fit(model, epochs=1, callbacks=[ft.hooks.TensorBoard(tmp_path)])
    assert [step for step, _ in scalars(tmp_path)["epoch/loss"]] == [13, 26]


@pytest.mark.parametrize(
    ("every", "until"),
    [
        (ft.every(steps=4), [7]),
        pytest.param(ft.every(steps=4), [7, 11], marks=pytest.mark.long),
        pytest.param(ft.every(steps=13), [14], marks=pytest.mark.long),
        pytest.param(ft.every(epochs=1), [20], marks=pytest.mark.long),
    ],
    ids=["in mid-epoch", "twice", "at an epoch's last step", "at the ends of epochs"],
)
def test_files_of_a_fit_that_was_interrupted_are_those_of_one_that_never_was(
    every: Any, until: list[int], tmp_path
) -> None:
    def run(folder: pathlib.Path, *others: Any, **how: Any) -> Any:
        log, lines = ft.hooks.TensorBoard(folder / "tb", every=1), folder / "log.jsonl"
        callbacks = [*others, log, ft.hooks.JSONLines(lines, every=3)]
        return fit(fresh(), epochs=3, callbacks=callbacks, fuse=2, **DATA, **how)

    run(tmp_path / "straight")
    pieces = tmp_path / "pieces"
    for batches in until:
        saved = ft.Checkpointer(tmp_path / "c", every=every)
        with pytest.raises(RuntimeError, match="interrupted"):
            run(pieces, Batches(batches), checkpointer=saved)
    run(pieces, checkpointer=ft.Checkpointer(tmp_path / "c", every=every))
    assert scalars(pieces / "tb") == scalars(tmp_path / "straight" / "tb")
    straight, again = (
        [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "straight", pieces)
    )
    assert again == straight
    assert len(straight) > 13


def test_what_was_logged_before_an_error_is_on_the_disk(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(fresh(), callbacks=[ft.hooks.TensorBoard(tmp_path, every=1), Batches(9)], fuse=3)
    assert [step for step, _ in scalars(tmp_path)["loss"]] == [*range(1, 10)]
