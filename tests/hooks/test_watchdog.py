import threading

import numpy as np
import pytest

import functrain as ft


def step(state, batch):
    return state + 1, {"loss": batch[0]}


def loader_that_hangs(file, released):
    """Yields a batch, then waits until the watchdog has printed."""

    def batches():
        yield np.ones(2, np.float32)
        while "Watchdog" not in file.read_text() and not released.wait(0.05):
            pass
        yield np.ones(2, np.float32)

    return batches()


def test_the_stacks_name_what_a_run_waits_for_and_the_run_goes_on(tmp_path) -> None:
    path = tmp_path / "stacks.txt"
    with path.open("w") as file:
        hook = ft.hooks.Watchdog(0.5, file=file)
        data = loader_that_hangs(path, threading.Event())
        state, _ = ft.fit(0, step, data, hooks=[hook], fuse=1, verbose=0)
    assert state == 2
    text = path.read_text()
    assert "no step has ended for 0.5 seconds" in text
    assert "in batches" in text
    # Once for each time that the run makes no progress.
    assert text.count("Watchdog: ") == 1


def test_a_run_that_goes_on_prints_nothing_and_leaves_no_thread(tmp_path) -> None:
    path = tmp_path / "stacks.txt"
    with path.open("w") as file:
        hook = ft.hooks.Watchdog(600, file=file)
        ft.fit(0, step, [np.ones(2, np.float32)] * 4, hooks=[hook], verbose=0)
    assert path.read_text() == ""
    assert not [x for x in threading.enumerate() if x.name == "functrain-watchdog"]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "60"])
def test_what_is_no_number_of_seconds_is_refused(seconds) -> None:
    with pytest.raises(ValueError, match="seconds: expected a positive number, got"):
        ft.hooks.Watchdog(seconds)
