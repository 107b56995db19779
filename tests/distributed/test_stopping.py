"""Runs that two processes share: a stop in one is a stop in all; one that leaves ends all."""

import pathlib
import re
import time
from typing import Any

import pytest

from tests.distributed.reports import reports
from tests.distributed.test_launch import launched

PROGRAM = str(pathlib.Path(__file__).parent / "shared_run.py")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """The steps that were taken in each process, and the results, by who stopped."""
    return [
        {name: result for name, (result, _) in own.items()}
        for own in reports("shared_run.py", "stops")
    ]


def total(steps: int) -> float:
    """The sum of the batches of so many steps, of which an epoch has eight."""
    return float(sum(sum(range(4 * (i % 8), 4 * (i % 8) + 4)) for i in range(steps)))


def test_processes_that_stop_at_the_same_event_take_no_step_more(found) -> None:
    for own in found:
        assert own["all"] == [10, total(10)]


@pytest.mark.parametrize("who", ["the first", "the second", "the second at the end of an epoch"])
def test_where_one_process_stops_all_stop_at_one_event_some_programs_later(who, found) -> None:
    first, second = (own[who] for own in found)
    assert first == second
    steps, result = first
    assert 8 <= steps <= 18  # two programs of two steps may be under way, and one more be begun
    assert result == total(steps)


def test_where_each_process_stops_at_another_step_all_stop_at_the_later_one(found) -> None:
    assert found[0]["each at another step"] == found[1]["each at another step"]
    assert 10 <= found[0]["each at another step"][0] <= 14


def test_a_stop_at_the_last_step_lets_the_run_end_as_it_would(found) -> None:
    for own in found:
        assert own["the second at the last step"] == [24, total(24)]


def test_a_loop_of_ones_own_is_stopped_in_all_processes(found) -> None:
    assert found[0]["by hand"] == found[1]["by hand"]
    assert 4 <= found[0]["by hand"] <= 12


def test_a_process_that_trains_for_itself_stops_alone(found) -> None:
    assert [own["alone"][0] for own in found] == [24, 10]


# What the launcher prints for each way to leave a run, of the process that left or of the other.
REASONS = {
    "break": r"run was left by process {} after 4 steps",
    "exit": r"run was left by process {} after 10 steps",
    "exception": "ValueError: mine",
    "hang": "the process ends: no step has ended for 4 seconds",
}
WAYS = [
    pytest.param(way, process, marks=[] if process else pytest.mark.long)
    for way in REASONS
    for process in (0, 1)
]


@pytest.mark.parametrize(("way", "process"), WAYS)
def test_however_a_process_leaves_a_run_the_launcher_ends_all_soon(
    way: str, process: int, tmp_path: pathlib.Path
) -> None:
    begun = time.monotonic()
    launcher = launched("--restarts", 0, PROGRAM, way, process, tmp_path / "run")
    out, err = launcher.communicate(timeout=100)  # by itself JAX waits for 300 seconds
    assert time.monotonic() - begun < 40
    assert launcher.returncode not in (0, 143), err
    assert re.search(REASONS[way].format(process), out + err), out + err
