"""New checkpoints are handed to a function in another process: each once, the oldest first."""

import pathlib
import signal
import subprocess
import sys
import threading
import time
import types
from typing import Any

import numpy as np
import pytest

import functrain as ft
from functrain.checkpoint.__main__ import main
from tests import fork_server

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


def test_one_whose_replacement_was_interrupted_is_given_by_its_step(tmp_path) -> None:
    save(tmp_path, 12)
    (tmp_path / f"{12:012d}").rename(tmp_path / f"{12:012d}.functrain-old")
    with pytest.warns(UserWarning, match="was kept, and is loaded"):
        (path,) = ft.watch_checkpoints(tmp_path, timeout=0.05, **QUICK)
    assert path.endswith(f"{12:012d}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": -1}, "after: expected an integer of at least 0, got -1"),
        ({"interval": 0}, "interval: expected a positive number of seconds, got 0"),
        ({"timeout": float("nan")}, "timeout: expected a positive number of seconds, or None"),
    ],
)
def test_arguments_are_checked_before_the_first_look(tmp_path, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        ft.watch_checkpoints(tmp_path, **options)


TRAINER = """
import sys, time, jax, jax.numpy as jnp, numpy as np, functrain as ft

def slow(event):
    time.sleep(float(sys.argv[2]))

step = jax.jit(lambda state, batch: ({"w": state["w"] + 1}, {}))
ft.fit({"w": jnp.zeros(3)}, step, [np.ones(2)] * 2, epochs=6, verbose=0, hooks=[slow], fuse=1,
       checkpointer=ft.Checkpointer(sys.argv[1], every=1, keep=None))
"""
EVALUATOR = """
import os, sys, time
import jax.numpy as jnp, functrain as ft

def main(path):
    value = float(ft.load(path, {"w": jnp.zeros(3)})["w"][0])
    with open("evaluated", "a") as file:
        file.write(f"{int(os.path.basename(path))} {value:g}\\n")
    time.sleep(0.05)
"""


def command(directory: pathlib.Path) -> list[str]:
    options = ["--watch", "evaluator:main", "--progress", "progress", "--interval", "0.02"]
    return [sys.executable, "-m", "functrain.checkpoint", str(directory), *options]


def test_a_process_evaluates_every_checkpoint_of_another_although_it_is_killed(tmp_path) -> None:
    run, evaluated = tmp_path / "run", tmp_path / "evaluated"
    (tmp_path / "evaluator.py").write_text(EVALUATOR)
    trainer = fork_server.Popen([sys.executable, "-c", TRAINER, str(run), "0.1"])
    watcher = fork_server.Popen(command(run), cwd=tmp_path)
    until = time.monotonic() + 120
    while not evaluated.exists() or len(evaluated.read_text().splitlines()) < 4:
        assert time.monotonic() < until
        time.sleep(0.01)
    watcher.send_signal(signal.SIGKILL)
    watcher.wait()
    # It ends by itself, because the run does.
    fork_server.run(command(run), cwd=tmp_path, check=True, timeout=120)
    assert trainer.wait() == 0
    lines = [tuple(map(int, line.split())) for line in evaluated.read_text().splitlines()]
    assert all(step == value for step, value in lines)
    # Only the one during which it was killed may come again.
    steps = [step for step, _ in lines]
    assert sorted(set(steps)) == list(range(1, 13))
    assert len(steps) <= 13
    assert steps == sorted(steps)
    assert int((tmp_path / "progress").read_text()) == 12
    fork_server.run(command(run), cwd=tmp_path, check=True, timeout=120)
    assert len(evaluated.read_text().splitlines()) == len(lines)


def test_an_error_of_the_function_ends_the_command_and_the_step_is_not_done(tmp_path) -> None:
    save(tmp_path / "run", 1, 2)
    (tmp_path / "evaluator.py").write_text("def main(path):\n    1 / int(path[-1] != '2')\n")
    done = fork_server.run(
        command(tmp_path / "run"), cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert int((tmp_path / "progress").read_text()) == 1


def test_the_name_of_the_function_is_checked(tmp_path) -> None:
    with pytest.raises(ValueError, match="--watch: expected a module and a function"):
        main([str(tmp_path), "--watch", "evaluate"])


def test_what_would_fail_after_a_call_is_refused_before_it(tmp_path, monkeypatch) -> None:
    called: list[str] = []
    monkeypatch.setitem(sys.modules, "evaluator", types.SimpleNamespace(main=called.append, n=3))
    save(tmp_path / "run", 1, 2)
    watch = [str(tmp_path / "run"), "--timeout", "0.05", "--watch"]
    with pytest.raises(ValueError, match="--watch: expected a function of a path, got 3"):
        main([*watch, "evaluator:n"])
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="got a file at"):
        main([*watch, "evaluator:main", "--progress", str(tmp_path / "file" / "progress")])
    assert not called
    progress = tmp_path / "new" / "progress"
    main([*watch, "evaluator:main", "--progress", str(progress)])
    assert numbers(called) == [1, 2]
    assert progress.read_text().endswith("2")
