"""New checkpoints are handed to a function in another process: each once, the oldest first."""

import threading
from typing import Any

import numpy as np

import functrain as ft

LIKE = {"w": np.zeros(3)}
QUICK = {"interval": 0.01}


def save(directory: Any, *steps: int) -> None:
    with ft.Checkpointer(directory, keep=None) as checkpoints:
        for step in steps:
            checkpoints.save({"w": np.full(3, float(step))}, step)


def numbers(paths: Any) -> list[int]:
    return [int(ft.load(path, LIKE)["w"][0]) for path in paths]


def test_those_that_are_there_come_first_and_then_new_ones(tmp_path) -> None:
    save(tmp_path, 1, 2)
    watched = ft.watch_checkpoints(tmp_path, interval=0.01)
    assert numbers([next(watched), next(watched)]) == [1, 2]
    late = threading.Timer(0.2, save, (tmp_path, 3, 5))
    late.start()
    assert numbers([next(watched), next(watched)]) == [3, 5]
    late.join()


def test_a_directory_may_appear_later_or_be_in_an_object_store(tmp_path) -> None:
    for directory in (tmp_path / "later", f"memory://watched-{tmp_path.name}/run"):
        watched = ft.watch_checkpoints(directory, interval=0.01, timeout=20)
        late = threading.Timer(0.1, save, (directory, 4))
        late.start()
        assert numbers([next(watched)]) == [4]
        late.join()
        save(directory, 6)
        assert numbers([next(watched)]) == [6]


def test_the_timeout_ends_the_wait_and_earlier_steps_are_left_out(tmp_path) -> None:
    save(tmp_path, 1, 2, 3)
    assert numbers(ft.watch_checkpoints(tmp_path, after=1, timeout=0.05, **QUICK)) == [2, 3]
    assert numbers(ft.watch_checkpoints(tmp_path, after=3, timeout=0.05, **QUICK)) == []


def test_one_that_is_removed_before_its_turn_is_left_out(tmp_path) -> None:
    save(tmp_path, 1, 2, 3)
    watched = ft.watch_checkpoints(tmp_path, timeout=0.05, **QUICK)
    assert numbers([next(watched)]) == [1]
    with ft.Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save({"w": np.full(3, 4.0)}, 4)
    assert numbers(watched) == [4]
