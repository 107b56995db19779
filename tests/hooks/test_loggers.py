"""Loggers: what they wrote, read by whoever reads such files."""

import io
import json
import os
import sys
import types
from typing import Any

import numpy as np
import pandas
import PIL.Image
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import functrain as ft

from .fits import EVAL, LOADER, fit, lives


def evaluation() -> Any:
    return ft.hooks.Evaluate(EVAL, LOADER, every=ft.every(steps=7))


def events(directory: Any) -> EventAccumulator:
    found = EventAccumulator(
        str(directory), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    )
    return found.Reload()


def scalars(directory: Any) -> dict[str, list[tuple[int, float]]]:
    found = events(directory)
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def lines(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_event_files_hold_what_the_history_holds_at_the_same_steps(tmp_path) -> None:
    log = ft.hooks.TensorBoard(tmp_path / "run", every=1)
    _, history = fit(evaluation(), log, eval_data=LOADER, eval_step=EVAL)
    found = scalars(tmp_path / "run")
    numbers = range(1, 61)
    assert found["loss"] == list(zip(numbers, history.steps["loss"].tolist(), strict=True))
    rates = history.steps["learning_rate"].tolist()
    assert found["learning_rate"] == list(zip(numbers, rates, strict=True))
    steps, values = history.within_epochs["val_loss"]
    assert found["val_loss"] == list(zip(steps, values.astype(np.float32), strict=True))
    for name in ("loss", "val_loss", "learning_rate"):
        epochs = history.epochs[name].astype(np.float32)
        assert found[f"epoch/{name}"] == list(zip([20, 40, 60], epochs, strict=True))
    assert set(found) == {
        *("loss", "learning_rate", "val_loss"),
        *("epoch/loss", "epoch/learning_rate", "epoch/val_loss"),
    }


def test_json_lines_hold_what_the_history_holds_in_the_order_of_the_steps(tmp_path) -> None:
    log = ft.hooks.JSONLines(tmp_path / "made" / "log.jsonl", every=1)
    _, history = fit(evaluation(), log)
    table = pandas.read_json(tmp_path / "made" / "log.jsonl", lines=True, precise_float=True)
    steps = table[table["loss"].notna()]
    assert steps["step"].tolist() == list(range(1, 61))
    assert steps["epoch"].tolist() == [0] * 20 + [1] * 20 + [2] * 20
    np.testing.assert_array_equal(steps["loss"].astype(np.float32), history.steps["loss"])
    evaluated = table[table["val_loss"].notna()]
    assert evaluated["step"].tolist() == history.within_epochs["val_loss"][0].tolist()
    assert evaluated["val_loss"].tolist() == history.within_epochs["val_loss"][1].tolist()
    epochs = table[table["epoch/loss"].notna()]
    assert epochs["epoch/loss"].tolist() == history.epochs["loss"].tolist()
    assert table["step"].is_monotonic_increasing
    assert len(table) == 60 + 3


@pytest.mark.parametrize("fuse", [1, 4, 9])
def test_every_so_many_steps_are_those_steps_however_they_are_fused(fuse, tmp_path) -> None:
    _, history = fit(ft.hooks.JSONLines(tmp_path / "log.jsonl", every=7), fuse=fuse)
    found = {line["step"]: line["loss"] for line in lines(tmp_path / "log.jsonl") if "loss" in line}
    assert list(found) == list(range(7, 61, 7))
    assert list(found.values()) == history.steps["loss"][6::7].tolist()


def test_numbers_that_are_not_finite_are_null_in_json_and_themselves_in_event_files(
    tmp_path,
) -> None:
    def late(event):
        if isinstance(event, ft.events.EpochEnd):
            event.values |= {"up": float("inf"), "bad": float("nan"), "fine": np.float32(1)}

    fit(late, ft.hooks.JSONLines(tmp_path / "x.jsonl"), ft.hooks.TensorBoard(tmp_path), epochs=1)
    last = lines(tmp_path / "x.jsonl")[-1]
    assert [last[f"epoch/{name}"] for name in ("up", "bad", "fine")] == [None, None, 1.0]
    found = {tag: values[0][1] for tag, values in scalars(tmp_path).items()}
    assert found["epoch/up"] == np.inf
    assert np.isnan(found["epoch/bad"])


class Logs:
    """Loggers of all kinds in a folder."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder

    def hooks(self) -> list[Any]:
        return [
            evaluation(),
            ft.hooks.Sample(
                lambda state: np.abs(state.params["w"])[None] / 3, every=ft.every(steps=9)
            ),
            ft.hooks.TensorBoard(self.folder / "events", every=1),
            ft.hooks.JSONLines(self.folder / "all.jsonl", every=1),
            ft.hooks.JSONLines(self.folder / "some.jsonl", every=4),
            ft.hooks.CSVLogger(self.folder / "epochs.csv"),
        ]

    def read(self) -> dict[str, Any]:
        texts = [*self.folder.glob("*.jsonl"), *self.folder.glob("*.csv")]
        found = events(self.folder / "events")
        pictures = [(image.step, image.encoded_image_string) for image in found.Images("sample")]
        return {
            **{path.name: path.read_text() for path in texts},
            **scalars(self.folder / "events"),
            "pictures": pictures,
        }


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[str, Any]:
    logs = Logs(tmp_path_factory.mktemp("straight"))
    fit(*logs.hooks())
    return logs.read()


# With 20, checkpoints fall on the last step of an epoch, before the lines of the epoch itself.
@pytest.mark.parametrize(
    ("cuts", "every"),
    [([3], 15), ([37], 15), ([20, 33, 34, 59], 15), ([60], 15), ([21, 41], 20)],
    ids=str,
)
def test_files_of_a_run_that_was_killed_are_those_of_one_that_never_was(
    cuts, every, straight, tmp_path
) -> None:
    logs = Logs(tmp_path)
    lives(lambda: logs.hooks(), tmp_path / "checkpoints", cuts, every)
    found = logs.read()
    assert found.keys() == straight.keys()
    for name in straight:
        assert found[name] == straight[name], name


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", ["TensorBoard", "JSONLines", "CSVLogger", "WandB"])
def test_a_logger_that_cannot_write_warns_once_and_training_continues(
    kind, tmp_path, monkeypatch
) -> None:
    if kind == "WandB":
        run = types.SimpleNamespace(id="x", dir="x/y", log=full_disk, finish=full_disk)
        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda: run))
        log = ft.hooks.WandB(every=1)
    else:
        log = getattr(ft.hooks, kind)(tmp_path / "log")
        name = {"TensorBoard": "_event"}.get(kind, "_add")
        monkeypatch.setattr(log, name, full_disk)
    with pytest.warns(UserWarning, match=f"{kind}.* No space left .* training continues") as caught:
        _, history = fit(log, checkpointer=ft.Checkpointer(tmp_path / "run"))
    assert len(caught) == 1
    assert len(history.steps["loss"]) == 60


def test_a_file_that_was_empty_at_the_checkpoint_has_no_line_twice(tmp_path) -> None:
    def hooks() -> list[Any]:
        return [ft.hooks.JSONLines(tmp_path / "log.jsonl", every=8, append=True)]

    lives(hooks, tmp_path / "run", [13], every=7)
    assert [line["step"] for line in lines(tmp_path / "log.jsonl") if "loss" in line] == [
        8, 16, 24, 32, 40, 48, 56
    ]  # fmt: skip


def test_what_a_checkpoint_counts_on_is_on_the_disk(tmp_path) -> None:
    log = ft.hooks.TensorBoard(tmp_path, every=1)
    log.begin()
    rows = {"loss": np.array([0.5, 0.25], np.float32)}
    at_two = ft.Position(step=2)
    log.logs(ft.events.ChunkEnd(position=at_two, state=(), steps=2, examples=1, rows=rows))
    log.state()
    assert scalars(tmp_path)["loss"] == [(1, 0.5), (2, 0.25)]
    log.close()


def test_a_run_that_is_begun_anew_takes_the_place_of_the_one_before(tmp_path) -> None:
    def hooks() -> list[Any]:
        paths = tmp_path / "events", tmp_path / "log.jsonl"
        return [ft.hooks.TensorBoard(paths[0], every=1), ft.hooks.JSONLines(paths[1], every=1)]

    fit(*hooks())
    fit(*hooks(), epochs=1)
    assert [step for step, _ in scalars(tmp_path / "events")["loss"]] == list(range(1, 21))
    assert [line["step"] for line in lines(tmp_path / "log.jsonl")] == [*range(1, 21), 20]


@pytest.mark.parametrize("kind", [ft.hooks.JSONLines, ft.hooks.CSVLogger])
def test_a_file_that_cannot_be_written_is_met_before_a_step_is_taken(kind, tmp_path) -> None:
    steps = []
    with pytest.raises(IsADirectoryError):
        fit(kind(tmp_path), lambda event: steps.append(event.step))
    assert not steps


def test_pictures_and_texts_reach_event_files_and_texts_json(tmp_path) -> None:
    bar = np.zeros((2, 3, 3), np.uint8)
    bar[:, 1] = 200

    def make(state: Any) -> dict[str, Any]:
        return {"picture": bar, "words": f"step {int(state.step)} <b>"}

    log = ft.hooks.JSONLines(tmp_path / "log.jsonl")
    when = ft.every(steps=30)
    fit(ft.hooks.Sample(make, every=when), ft.hooks.TensorBoard(tmp_path), log)
    found = events(tmp_path)
    assert [image.step for image in found.Images("picture")] == [30, 60]
    png = PIL.Image.open(io.BytesIO(found.Images("picture")[0].encoded_image_string))
    np.testing.assert_array_equal(np.asarray(png), bar)
    texts = [t.tensor_proto.string_val[0] for t in found.Tensors("words/text_summary")]
    assert texts == [b"step 30 <b>", b"step 60 <b>"]
    named = {
        line["step"]: line["words"] for line in lines(tmp_path / "log.jsonl") if "words" in line
    }
    assert named == {30: "step 30 <b>", 60: "step 60 <b>"}


@pytest.mark.parametrize(
    ("module", "make", "message"),
    [
        ("tensorboardX", lambda: ft.hooks.TensorBoard("x"), r"'functrain\[tensorboard\]'"),
        ("wandb", lambda: ft.hooks.WandB(), r"'functrain\[wandb\]'"),
        ("mlflow", lambda: ft.hooks.MLflow(), r"'functrain\[mlflow\]'"),
        ("trackio", lambda: ft.hooks.Trackio(), r"'functrain\[trackio\]'"),
        ("comet_ml", lambda: ft.hooks.Comet(), r"'functrain\[comet\]'"),
        ("PIL", lambda: ft.hooks.Sample(abs, directory="x"), r"'functrain\[pictures\]'"),
    ],
)
def test_a_missing_library_is_named_with_the_line_that_installs_it(
    module, make, message, monkeypatch
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {message}"):
        make()


def test_relative_paths_stay_where_they_were_when_the_process_goes_elsewhere(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    go = ft.at(10)(lambda event: monkeypatch.chdir(elsewhere))
    sample = ft.hooks.Sample(lambda state: "", directory="samples")
    fit(
        sample, ft.hooks.TensorBoard("runs"), ft.hooks.JSONLines("log.jsonl", every=1), go, epochs=1
    )
    assert not list(elsewhere.iterdir())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"elsewhere", "samples", "runs", "log.jsonl"}
    assert [line["step"] for line in lines(tmp_path / "log.jsonl")] == [*range(1, 21), 20]


def test_loggers_do_not_hide_that_nobody_provides_a_value(tmp_path) -> None:
    sample = ft.hooks.Sample(lambda state: "", every=ft.at(1))
    watching = [sample, ft.hooks.TerminateOnNaN(), ft.hooks.Profile(tmp_path, start=1)]
    loggers = [ft.hooks.TensorBoard(tmp_path / "x"), ft.hooks.JSONLines(tmp_path / "x.jsonl")]
    with pytest.raises(ValueError, match=r"monitor: expected one of .* got 'val_los'") as caught:
        fit(*watching, *loggers, ft.hooks.EarlyStopping("val_los", mode="min"))
    assert not hasattr(caught.value, "fit_result")


@pytest.mark.parametrize("logger", [ft.hooks.TensorBoard, ft.hooks.CSVLogger, ft.hooks.JSONLines])
def test_a_log_that_is_removed_during_the_run_is_told_and_goes_on(logger, tmp_path) -> None:
    is_folder = logger is ft.hooks.TensorBoard

    @ft.at(10)
    def remove(event: Any) -> None:
        next(tmp_path.iterdir()).unlink()

    log = logger(tmp_path if is_folder else tmp_path / "log", every=1)
    with pytest.warns(UserWarning, match="log was removed during the run") as told:
        fit(log, remove, epochs=1, fuse=5)
    assert len(told) == 1
    (path,) = tmp_path.iterdir()
    assert b"loss" in path.read_bytes()


def test_a_pipe_is_refused_before_the_run(tmp_path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(ValueError, match="path: expected a file, got 'a pipe'"):
        fit(ft.hooks.JSONLines(tmp_path / "log"))
