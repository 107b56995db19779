import csv
import resource

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

from .fits import EVAL, LOADER, fit, lives


def test_csv_has_a_row_each_time_it_is_due(tmp_path) -> None:
    by_epoch = ft.hooks.CSVLogger(tmp_path / "logs" / "epochs.csv")
    by_step = ft.hooks.CSVLogger(tmp_path / "steps.csv", every=ft.every(steps=6))
    _, history = fit(by_epoch, by_step, eval_data=LOADER, eval_step=EVAL, epochs=2)
    with (tmp_path / "logs" / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["val_loss"]) for row in rows] == history.epochs["val_loss"].tolist()
    with (tmp_path / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [6, 12, 18, 24, 30, 36]
    expected = history.steps["loss"][5::6]
    np.testing.assert_array_equal(np.array([float(r["loss"]) for r in rows], np.float32), expected)


def test_csv_goes_on_below_what_a_run_before_it_wrote(tmp_path) -> None:
    def log(epoch: int, append: bool, **values: float) -> None:
        hook = ft.hooks.CSVLogger(tmp_path / "log.csv", append=append)
        hook(ft.events.EpochEnd(position=ft.Position(step=4, epoch=epoch), state=(), values=values))
        hook.close()

    log(0, append=True, loss=3.0, accuracy=0.25)  # there is no file yet
    log(1, append=True, accuracy=0.5, loss=2.0)
    written = (tmp_path / "log.csv").read_text().splitlines()
    assert written == ["epoch,step,loss,accuracy", "0,4,3.0,0.25", "1,4,2.0,0.5"]
    log(2, append=True, mae=1.0)
    assert (tmp_path / "log.csv").read_text().splitlines() == [
        "epoch,step,loss,accuracy,mae",
        "0,4,3.0,0.25,",
        "1,4,2.0,0.5,",
        "2,4,,,1.0",
    ]
    log(2, append=False, mae=1.0)
    assert (tmp_path / "log.csv").read_text().splitlines() == ["epoch,step,mae", "2,4,1.0"]


def test_a_row_that_did_not_fit_on_the_disk_is_missing_and_no_other(tmp_path) -> None:
    path = tmp_path / "log.csv"
    log = ft.hooks.CSVLogger(path)

    def add(step: int, **values: float) -> None:
        at = ft.Position(step=step)
        log(ft.events.EpochEnd(position=at, state=(), values={"loss": 0.5, **values}))

    add(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 3, limits[1]))
    with pytest.warns(UserWarning, match="could not write: OSError.*too large"):
        add(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    add(3)
    add(4, accuracy=1.0)
    assert path.read_text().splitlines()[1:] == ["0,1,0.5,", "0,3,0.5,", "0,4,0.5,1.0"]
    log.close()


def every_other_epoch(path) -> list:
    evaluation = ft.hooks.Evaluate(EVAL, LOADER, every=ft.every(epochs=2))
    return [evaluation, ft.hooks.CSVLogger(path)]


def test_a_value_that_comes_later_is_a_new_column_and_does_not_end_the_run(tmp_path) -> None:
    _, history = fit(*every_other_epoch(tmp_path / "log.csv"), epochs=4)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = [row["val_loss"] for row in rows]
    assert [bool(value) for value in values] == [False, True, False, True]
    assert list(map(float, values[1::2])) == history.epochs["val_loss"][1::2].tolist()
    assert [float(row["loss"]) for row in rows] == history.epochs["loss"].tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("cuts", [[25], [45], [21, 41, 61]], ids=str)
def test_a_file_whose_columns_grew_after_the_checkpoint_is_that_of_one_run(cuts, tmp_path) -> None:
    fit(*every_other_epoch(tmp_path / "straight.csv"), epochs=4)
    # The checkpoint of step 20 is older than the column, which the killed run has added.
    lives(
        lambda: every_other_epoch(tmp_path / "log.csv"), tmp_path / "run", cuts, epochs=4, every=20
    )
    assert (tmp_path / "log.csv").read_text() == (tmp_path / "straight.csv").read_text()


def test_a_csv_of_steps_does_not_wait_for_the_device_and_has_its_row_when_the_logs_come(
    tmp_path,
) -> None:
    log = ft.hooks.CSVLogger(tmp_path / "log.csv", every=ft.every(steps=2))
    rows = {"loss": jnp.array([0.5, 0.25])}
    at_two = ft.Position(step=2)
    event = ft.events.ChunkEnd(
        position=at_two, state=(), values={"v": 1.0}, steps=2, examples=1, rows=rows
    )
    log(event)
    assert not (tmp_path / "log.csv").exists()
    log.logs(event)
    assert (tmp_path / "log.csv").read_text().splitlines()[1:] == ["0,2,0.25,1.0"]
    log.close()
