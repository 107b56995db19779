import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import functrain as ft


def step(state, batch):
    return state + 1, {"loss": batch[0]}


def test_the_stacks_name_what_a_run_waits_for_and_the_run_goes_on(tmp_path) -> None:
    path = tmp_path / "stacks.txt"

    def batches():
        yield np.ones(2, np.float32)
        # Until the stacks have been printed.
        while "in batches" not in path.read_text():
            time.sleep(0.05)
        yield np.ones(2, np.float32)

    with path.open("w") as file:
        hook = ft.hooks.Watchdog(0.5, exits=False, file=file)
        state, _ = ft.fit(0, step, batches(), hooks=[hook], fuse=1, verbose=0)
    assert state == 2


def test_stacks_are_printed_once_for_each_time_that_a_run_makes_no_progress(tmp_path) -> None:
    with (tmp_path / "stacks.txt").open("w") as file:
        hook = ft.hooks.Watchdog(0.01, exits=False, file=file)
        hook.begin()
        time.sleep(0.5)
        hook.close()
    text = (tmp_path / "stacks.txt").read_text()
    assert text.count("Timeout (0:00:00.010000)!") == 1


HANGS = """
    import time, functrain as ft
    batches = (i if i < 3 else time.sleep(60) for i in range(4))
    ft.fit(0, lambda s, b: (s + b, {}), batches, hooks=[ft.hooks.Watchdog(0.5)], verbose=0)
"""


def test_a_run_that_hangs_ends_with_a_status(tmp_path) -> None:
    program = [sys.executable, "-c", textwrap.dedent(HANGS)]
    begun = time.monotonic()
    done = subprocess.run(program, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert time.monotonic() - begun < 40
    assert "Watchdog: no step has ended for 1 seconds." in done.stderr
    assert "in <genexpr>" in done.stderr


def test_a_run_that_goes_on_prints_nothing_and_leaves_no_thread(tmp_path) -> None:
    path = tmp_path / "stacks.txt"
    with path.open("w") as file:
        hook = ft.hooks.Watchdog(600, file=file)
        ft.fit(0, step, [np.ones(2, np.float32)] * 4, hooks=[hook], verbose=0)
    assert path.read_text() == ""
    assert not [x for x in threading.enumerate() if x.name == "functrain-watchdog"]


@pytest.mark.parametrize("seconds", [0, float("inf"), "60"])
def test_what_is_no_number_of_seconds_is_refused(seconds) -> None:
    with pytest.raises(ValueError, match="seconds: expected a positive number, got"):
        ft.hooks.Watchdog(seconds)
