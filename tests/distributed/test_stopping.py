"""Runs that two processes share: a stop in one is a stop in all, and an exit of one ends all."""

import json
import pathlib
import subprocess
from typing import Any

import pytest

from tests.checkpoint.test_processes import ended, start

PROGRAM = str(pathlib.Path(__file__).parent / "stopping.py")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """The steps that were taken in each process, and the results, by who stopped."""
    printed = ended(start(2, [PROGRAM], "stops"))
    return [json.loads(next(x for x in lines if x.startswith("{"))) for lines in printed]


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


def left(status: int, process: int) -> list[tuple[str, str, int]]:
    """Returns what each process said and its exit status, after one has left."""
    started = start(2, [PROGRAM], f"exit:{status}", str(process))
    try:
        done = [process.communicate(timeout=120) for process in started]
    except subprocess.TimeoutExpired:  # by itself JAX waits for 300 seconds
        for process_ in started:
            process_.kill()
        raise
    return [(out, err, p.returncode) for (out, err), p in zip(done, started, strict=True)]


@pytest.mark.parametrize("process", [0, 1])
def test_sys_exit_in_one_process_ends_all_and_calls_its_functions(process: int) -> None:
    done = left(3, process)
    assert [status for _, _, status in done] == [1, 1], done
    lines = [x for x in done[process][0].splitlines() if x.startswith("at exit: ")]
    assert lines == ["at exit: registered before initialize", "at exit: registered before jax"]


@pytest.mark.long
def test_sys_exit_without_a_failure_in_mid_training_ends_the_others_with_a_word() -> None:
    (_, waited, status), (_, _, other) = left(0, 1)
    assert [status, other] == [1, 1]
    assert "functrain: process 0 waits for a program in which not all take part" in waited
    assert "left by process 1 after 10 steps" in waited
