"""bridge.fit over several processes: the numbers of one process of as many devices."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from tests.bridge.train import processes
from tests.several_processes import lines_starting, outputs, start

PROGRAM = str(pathlib.Path(__file__).parent / "processes.py")


def told(processes: int, what: str, *arguments: object, code: int = 0) -> list[list[str]]:
    return outputs(start(processes, [PROGRAM, what], *map(str, arguments)), code)


def values(printed: list[list[str]], name: str) -> list[Any]:
    return [
        json.loads(line.removeprefix(f"{name} ")) for line in lines_starting(printed, f"{name} ")
    ]


PARTS = {"data_parallel": 1, "model_parallel": 2, "by_rule": 4}


@pytest.mark.long
@pytest.mark.parametrize("names", [("model_parallel",), ("data_parallel", "by_rule")])
def test_fits_evaluations_and_predictions_are_those_of_one_process(
    tmp_path: pathlib.Path, names: tuple[str, ...]
) -> None:
    (one_folder := tmp_path / "one").mkdir()
    (two_folder := tmp_path / "two").mkdir()
    one, two = told(1, "numbers", one_folder, *names), told(2, "numbers", two_folder, *names)
    for name in names:
        (expected, size), *others = values(one, name) + values(two, name)
        assert size * PARTS[name] == 8 * 8 * 4  # of a kernel, on one device
        assert others[0] == others[1]
        for a, b in zip(expected, others[0][0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
        assert others[0][1] == size
        rows = [(folder / f"{name}.csv").read_text() for folder in (one_folder, two_folder)]
        a, b = (np.genfromtxt(text.splitlines()[1:], delimiter=",") for text in rows)
        np.testing.assert_allclose(a, b, rtol=1e-5)
    shown = [sum(line.startswith("Epoch ") for line in lines) for lines in (*one, *two)]
    assert shown == [2 * len(names), 2 * len(names), 0]  # the first tells


# Of a grain.MapDataset, Keras's own fit says so at the end of the second epoch.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_each_process_may_read_its_part_of_the_data(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = told(2, "parts", tmp_path)
    processes.parts(str(tmp_path))  # here there is one
    (expected,) = values([capsys.readouterr().out.splitlines()], "parts")
    first, second = values(two, "parts")
    assert first == second
    assert len(expected) == 8
    for a, b in zip(expected, first, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for line in lines_starting(two, "refused "):
        assert "x: expected as many batches" in line
        assert "got next 8 in process 0, 7 in process 1" in line


@pytest.mark.long
def test_sigterm_to_one_ends_both_at_one_step_and_they_go_on_to_the_same_bits(
    tmp_path: pathlib.Path,
) -> None:
    straight = told(2, "going_on", tmp_path / "straight")
    told(2, "going_on", tmp_path / "killed", 20, code=143)
    (step,) = [int(x.name) for x in (tmp_path / "killed").iterdir() if x.name.isdecimal()]
    assert 20 < step < 96
    resumed = told(2, "going_on", tmp_path / "killed")
    assert len(set(lines_starting(straight, "ends"))) == 1
    assert lines_starting(resumed, "ends") == lines_starting(straight, "ends")
    rows = [(tmp_path / f"{name}.csv").read_text() for name in ("straight", "killed")]
    assert rows[0] == rows[1]


@pytest.mark.long
def test_a_stop_of_training_in_one_process_is_one_in_all(tmp_path: pathlib.Path) -> None:
    printed = told(2, "stopping", tmp_path)
    steps = {}
    for name in ("in_both", "in_the_second", "at_an_epoch_of_both", "at_an_epoch_of_the_first"):
        first, second = values(printed, name)
        assert first == second
        steps[name], losses = first
        assert len(losses) == -(-steps[name] // 8)  # epochs begun
    assert steps["in_both"] == 12
    assert 12 <= steps["in_the_second"] <= 20  # two programs of two steps may be under way
    assert steps["at_an_epoch_of_both"] == 16
    assert 16 <= steps["at_an_epoch_of_the_first"] <= 24


@pytest.mark.long
def test_what_processes_cannot_do_together_is_refused_in_each_of_them(
    tmp_path: pathlib.Path,
) -> None:
    for printed in told(2, "refusals", tmp_path):
        lines = [json.loads(x.removeprefix("refused ")) for x in printed if "refused " in x]
        assert len(lines) == 7
        begins = (
            "model: expected a model on the devices of all 2 processes",
            "callbacks: expected no BackupAndRestore beside checkpointer= or in several processes",
            "callbacks: expected no ModelCheckpoint beside checkpointer= or in several processes",
            "x: sharding: expected batches that divide evenly over P('batch',) of the mesh",
            *["data: expected the same batches in every process"] * 3,
        )
        for line, begin in zip(lines, begins, strict=True):
            assert line.startswith(begin), line
