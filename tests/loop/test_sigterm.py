"""SIGTERM and Ctrl-C with a checkpointer: the run saves itself at the end of the chunk."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain.internal import DeferredSignals
from tests import fork_server
from tests.conftest import digest

ROOT = pathlib.Path(__file__).parents[2]
EPOCHS, PER_EPOCH = 2, 400


class Slow:
    """Batches that take their time, as long as a training is to be met in the midst of it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return PER_EPOCH

    def __getitem__(self, i: int) -> np.ndarray:
        return np.full((2, 3), i, np.float32)

    def __iter__(self) -> Any:
        for i in range(PER_EPOCH):
            if i == 21 and self.seconds > 60:
                print("asleep", flush=True)
            if i > 20:
                time.sleep(self.seconds)
            yield self[i]


START = {"w": jnp.zeros(3)}
FUSE = 8


def step(state: Any, batch: Any) -> Any:
    return {"w": 0.99 * state["w"] + batch.mean(0)}, {"mean": batch.mean()}


def by_fit(data: Any, checkpointer: Any, tell: Any) -> str:
    state, history = ft.fit(
        START,
        step,
        data,
        epochs=EPOCHS,
        checkpointer=checkpointer,
        hooks=[tell],
        fuse=FUSE,
        verbose=0,
    )
    return digest((state, history.steps))


def by_run(data: Any, checkpointer: Any, tell: Any) -> str:
    for event in ft.run(START, step, data, epochs=EPOCHS, checkpointer=checkpointer, fuse=FUSE):
        tell(event)
    return digest(event.state)


WAYS = {"fit": by_fit, "run": by_run}


def tell(event: Any) -> None:
    if event.step == 16:
        print("under way", flush=True)


def main(way: str, folder: str, seconds: float) -> None:
    print(WAYS[way](Slow(seconds), ft.Checkpointer(folder, every=ft.at(8)), tell), flush=True)


def begun(way: str, folder: pathlib.Path, seconds: float) -> subprocess.Popen[str]:
    """Begins a training in a process of its own, and waits until it is under way."""
    code = f"from tests.loop.test_sigterm import main; main({way!r}, {str(folder)!r}, {seconds})"
    child = fork_server.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdout is not None
    said = child.stdout.readline()
    assert said == "under way\n", child.communicate()
    return child


@pytest.mark.parametrize("way", ["fit", "run"])
@pytest.mark.filterwarnings("ignore:data. Slow does not report its position")
def test_sigterm_saves_at_the_end_of_the_chunk_and_ends_with_143(
    way: str, tmp_path: pathlib.Path
) -> None:
    child = begun(way, tmp_path, 0.05)
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (143, ""), err
    last = ft.Checkpointer(tmp_path).latest()
    assert last is not None
    assert 16 <= last < PER_EPOCH
    assert last % FUSE == 0
    straight = WAYS[way](Slow(0), None, lambda event: None)
    resumed = WAYS[way](Slow(0), ft.Checkpointer(tmp_path), lambda event: None)
    assert resumed == straight


def test_sigusr1_saves_the_run_which_goes_on(tmp_path: pathlib.Path) -> None:
    def ask(event: Any) -> None:
        if event.step == 24:
            os.kill(os.getpid(), signal.SIGUSR1)

    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    checkpointer = ft.Checkpointer(tmp_path, keep=None)
    state, _ = ft.fit(START, step, Slow(0), checkpointer=checkpointer, fuse=FUSE, hooks=[ask])
    assert checkpointer.steps() == [24, PER_EPOCH]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    straight, _ = ft.fit(START, step, Slow(0), fuse=FUSE)
    assert digest(state) == digest(straight)


def test_a_second_sigterm_ends_the_process_at_once(tmp_path: pathlib.Path) -> None:
    child = begun("fit", tmp_path, 3600.0)  # the chunk will never be over
    assert child.stdout is not None
    assert child.stdout.readline() == "asleep\n"
    child.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 143, err
    assert ft.Checkpointer(tmp_path).verify() == {}


def trained(checkpointer: Any, *hooks: Any, epochs: int = 2) -> Any:
    data = ft.ArrayLoader(np.ones((40, 3), np.float32), 2)
    return ft.fit(
        START,
        step,
        data,
        epochs=epochs,
        checkpointer=checkpointer,
        hooks=hooks,
        fuse=FUSE,
        verbose=0,
    )


def sends(number: int, at: int) -> Any:
    @ft.at(at)
    def send(event: Any) -> None:
        os.kill(os.getpid(), number)

    return send


@pytest.fixture
def handled() -> Any:
    """A SIGTERM that the program handles itself."""
    seen: list[Any] = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen[0]())
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_sigterm_that_the_program_handles_goes_to_it_after_the_save(
    tmp_path: pathlib.Path, handled: list[Any]
) -> None:
    checkpointer = ft.Checkpointer(tmp_path, every=ft.at(10**9))
    seen = []
    handled.append(lambda: (checkpointer.wait(), seen.append(checkpointer.steps())))
    result = trained(checkpointer, sends(signal.SIGTERM, 13))
    assert seen == [[13]]
    assert len(result.history.steps["mean"]) == 40


def test_a_save_that_fails_is_not_hidden_by_sigterm(
    tmp_path: pathlib.Path, handled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        monkeypatch.undo()
        raise OSError("the disk is full")

    seen: list[str] = []
    handled.append(lambda: seen.append("all is saved"))
    checkpointer = ft.Checkpointer(tmp_path)
    monkeypatch.setattr(checkpointer, "wait", fail)
    with pytest.raises(OSError, match="the disk is full"):
        trained(checkpointer, sends(signal.SIGTERM, 13))
    assert not seen


def test_sigterm_beside_ctrl_c_is_not_lost(handled: list[Any]) -> None:
    seen: list[str] = []
    handled.append(lambda: seen.append("SIGTERM"))

    def both() -> None:
        with DeferredSignals("run", saves=True):
            os.kill(os.getpid(), signal.SIGTERM)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        both()
    assert seen == ["SIGTERM"]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_saves_before_it_goes_on(tmp_path: pathlib.Path) -> None:
    checkpointer = ft.Checkpointer(tmp_path, every=ft.at(10**9))
    with pytest.raises(KeyboardInterrupt) as error:
        trained(checkpointer, sends(signal.SIGINT, 27))
    assert checkpointer.steps() == [27]
    assert len(error.value.fit_result.history.steps["mean"]) == 27
    again, straight = trained(ft.Checkpointer(tmp_path)), trained(None)
    assert digest((again.state, again.history.steps)) == digest(
        (straight.state, straight.history.steps)
    )


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_beside_a_stop_does_not_undo_the_stop(tmp_path: pathlib.Path) -> None:
    @ft.at(13)
    def stop(event: Any) -> None:
        event.stop()

    with pytest.raises(KeyboardInterrupt) as error:
        trained(ft.Checkpointer(tmp_path), stop, sends(signal.SIGINT, 13))
    assert len(error.value.fit_result.history.steps["mean"]) == 13
    again = trained(ft.Checkpointer(tmp_path), stop)
    assert len(again.history.steps["mean"]) == 13


def test_a_loop_that_is_left_lets_go_of_signals_and_of_the_directory(
    tmp_path: pathlib.Path,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        data = ft.ArrayLoader(np.ones((40, 3), np.float32), 2)
        for event in ft.run(START, step, data, checkpointer=ft.Checkpointer(tmp_path), fuse=4):
            assert event.step == 4
            assert signal.getsignal(signal.SIGTERM) is not before
            break
        assert signal.getsignal(signal.SIGTERM) is before


def test_runs_that_overlap_do_not_take_sigterm_from_one_another(
    tmp_path: pathlib.Path, handled: list[Any]
) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []
    handled.append(lambda: seen.append("SIGTERM"))
    data = ft.ArrayLoader(np.ones((40, 3), np.float32), 2)
    short, long = (
        ft.run(START, step, data, epochs=n, checkpointer=ft.Checkpointer(tmp_path / str(n)))
        for n in (1, 2)
    )
    next(short)
    next(long)
    list(short)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not seen
    list(long)
    assert seen == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_thread_saves_without_signals(tmp_path: pathlib.Path) -> None:
    found = []
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    hook = ft.at(9)(
        lambda event: found.append([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)])
    )
    thread = threading.Thread(target=trained, args=(ft.Checkpointer(tmp_path), hook))
    thread.start()
    thread.join()
    assert found == [before]
    assert ft.Checkpointer(tmp_path).latest() == 40
