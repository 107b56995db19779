"""What a population reports, where it is written."""

import csv
import io
import json

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import functrain as ft
from functrain.trainer._progress import ProgressReport
from functrain.trainer._recorder import Recorder

from .setting import EVAL, METERED, loader, of_all, population

EPOCHS = 2


def fitted(hooks=(), **how):
    return ft.fit(
        population(),
        of_all(METERED),
        loader(),
        epochs=EPOCHS,
        eval_data=loader(shuffle=False),
        eval_step=of_all(EVAL),
        hooks=hooks,
        verbose=0,
        **how,
    )


@pytest.fixture(scope="module")
def history() -> ft.History:
    return fitted().history


def test_a_history_has_every_step_and_epoch_of_every_member(history) -> None:
    assert {name: x.shape for name, x in history.steps.items()} == {
        "loss": (12, 3),
        "learning_rate": (12, 3),
    }
    assert {name: x.shape for name, x in history.epochs.items()} == {
        **dict.fromkeys(("loss", "accuracy", "val_loss", "val_accuracy"), (2, 3)),
        "learning_rate": (2, 3),
        "seconds": (2,),
    }
    means = history.steps["loss"].astype(np.float64).reshape(2, 6, 3).mean(1)
    np.testing.assert_allclose(history.epochs["loss"], means, rtol=1e-6)


def test_an_epoch_without_a_value_is_nan_for_all_members() -> None:
    @ft.every(epochs=2)
    def worst(event):
        if isinstance(event, ft.events.EpochEnd):
            event.values["worst"] = event.values["loss"].max()
            event.values["distance"] = event.values["loss"] - event.values["loss"].min()

    found = fitted([worst]).history.epochs
    assert np.isnan(found["distance"][0]).all()
    assert found["distance"].shape == (2, 3)
    assert found["worst"].shape == (2,)
    np.testing.assert_array_equal(found["worst"][1], found["loss"][1].max())


def test_loggers_have_a_column_or_a_name_a_member(tmp_path, history) -> None:
    json_lines = ft.hooks.JSONLines(tmp_path / "log.jsonl", every=1)
    board = ft.hooks.TensorBoard(tmp_path / "board", every=1)
    fitted([ft.hooks.CSVLogger(tmp_path / "log.csv"), json_lines, board])
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("loss", "val_accuracy"):
        written = [[float(row[f"{name}/{i}"]) for i in range(3)] for row in rows]
        np.testing.assert_array_equal(written, history.epochs[name])
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    written = [[line[f"loss/{i}"] for i in range(3)] for line in lines if "loss/0" in line]
    np.testing.assert_array_equal(written, history.steps["loss"])
    assert sum("epoch/val_loss/2" in line for line in lines) == EPOCHS
    found = EventAccumulator(str(tmp_path / "board")).Reload()
    for i in range(3):
        values = [event.value for event in found.Scalars(f"loss/{i}")]
        np.testing.assert_array_equal(values, history.steps["loss"][:, i])
        assert len(found.Scalars(f"epoch/val_loss/{i}")) == EPOCHS


def test_a_line_has_median_and_range(history) -> None:
    out = io.StringIO()
    recorder = Recorder(is_population=True)
    values = {"loss": np.array([0.5, 0.25, 1.0]), "seconds": 2.0}
    event = ft.events.EpochEnd(position=ft.Position(3), state=(), values=values)
    with ProgressReport(1, 3, "lines", console=Console(file=out, width=200)) as progress:
        progress(event, recorder)
    assert "loss 0.5 (0.25 to 1)  seconds 2" in out.getvalue()


def test_a_picture_has_a_line_a_member_and_their_median(history) -> None:
    pytest.importorskip("matplotlib")
    panels = {panel.get_title(): panel for panel in history.plot().axes}
    assert set(panels) == {"loss", "learning rate", "accuracy"}
    lines = panels["loss"].get_lines()
    assert len([line for line in lines if line.get_label().startswith("_")]) == 3 * 3
    middle = next(line for line in lines if line.get_label() == "each step, median of 3")
    np.testing.assert_allclose(middle.get_ydata(), np.median(history.steps["loss"], 1), rtol=1e-6)
    assert any("validation, median of 3" in line.get_label() for line in lines)
    assert "(" in history._repr_html_()


def test_members_that_stopped_leave_gaps_and_no_warning(history) -> None:
    pytest.importorskip("matplotlib")
    losses = history.steps["loss"].copy()
    losses[3:, 1] = np.nan
    losses[8:] = np.nan
    ft.History(steps={"loss": losses}, epochs={}).plot()


def test_hooks_see_the_values_of_members() -> None:
    seen = []

    @ft.every(steps=3)
    def look(event):
        if isinstance(event, ft.events.ChunkEnd):
            seen.append(event.latest()["loss"])

    history = fitted([look]).history
    np.testing.assert_array_equal(seen, history.steps["loss"][2::3])
