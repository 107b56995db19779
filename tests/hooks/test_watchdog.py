import faulthandler
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


def test_without_an_exit_the_stacks_are_printed_once_and_the_run_goes_on(capfd) -> None:
    def batches():
        yield np.ones(2, np.float32)
        time.sleep(1)
        yield np.ones(2, np.float32)

    hook = ft.hooks.Watchdog(0.3, exits=False)
    state, _ = ft.fit(0, step, batches(), hooks=[hook], fuse=1, verbose=0)
    assert state == 2
    printed = capfd.readouterr().err
    # On a busy machine, the compilation before the first step takes as long, too.
    assert printed.count("no step has ended for 0.3 seconds, at step 1, epoch 1.") == 1
    assert "in batches" in printed


@pytest.mark.parametrize(
    ("wait", "status"),
    [
        ("time.sleep(60)", 124),
        ("[x for x in iter(int, 1)]", 124),
        # This one holds the interpreter, so that no other thread of Python runs.
        ("re.match('(a*)*b', 'a' * 40)", 1),
    ],
    ids=["sleeps", "loops", "holds the interpreter"],
)
def test_a_run_that_hangs_ends_with_a_status_and_its_stacks(wait, status) -> None:
    program = f"""
        import multiprocessing, re, time, functrain as ft
        context = multiprocessing.get_context("spawn")
        if __name__ == "__main__":
            # A worker of a data loader, which has the pipes of this process.
            child = context.Process(target=time.sleep, args=(60,))
            child.start() if {status} == 124 else None
            batches = (i if i < 3 else {wait} for i in range(4))
            hooks = [ft.hooks.Watchdog(1)]
            ft.fit(0, lambda s, b: (s + b, {{}}), batches, hooks=hooks, fuse=1, verbose=0)
    """
    begun = time.monotonic()
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == status
    assert time.monotonic() - begun < 40
    if status == 124:
        assert "the process ends: no step has ended for 2 seconds, at step 3" in done.stderr
        assert done.stderr.count("in <genexpr>") == 1
    else:
        assert "Timeout (0:00:02.1" in done.stderr


def test_a_run_that_goes_on_prints_nothing_and_leaves_no_timer(capfd, monkeypatch) -> None:
    timers = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: timers.append(1))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", timers.clear)
    hook = ft.hooks.Watchdog(60)
    watches = []
    batches = watching([np.ones(2, np.float32)] * 4, watches)
    ft.fit(0, step, batches, hooks=[hook], verbose=0)
    (watch,) = watches
    watch.join(10)
    assert not watch.is_alive()
    assert not timers
    assert capfd.readouterr().err == ""


def watching(batches, watches):
    """Yields batches, and finds the thread that watches the run."""
    watches += [x for x in threading.enumerate() if "_watch" in x.name]
    assert watches
    yield from batches


@pytest.mark.parametrize("seconds", [0, float("inf"), "60"])
def test_what_is_no_number_of_seconds_is_refused(seconds) -> None:
    with pytest.raises(ValueError, match="seconds: expected a positive number, got"):
        ft.hooks.Watchdog(seconds)
