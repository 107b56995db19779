"""Saves and loads of one process, in any number of threads and hooks, do not disturb each other."""

import contextlib
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import functrain as ft
from functrain.checkpoint import _checkpoint, _writer
from functrain.checkpoint._arrays import StoredArrays
from tests.checkpoint.storages import train
from tests.conftest import digest


def fit(directory: pathlib.Path, *hooks: Any) -> Any:
    return train(directory, *hooks, epochs=2, every=1).state


def in_threads(*acts: Callable[[], Any]) -> list[Any]:
    """Returns what each returned or raised."""
    results: list[Any] = [None] * len(acts)

    def run(i: int) -> None:
        try:
            results[i] = acts[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a save or a load hangs"
    return results


@pytest.mark.parametrize("repeats", [1, pytest.param(50, marks=pytest.mark.long)])
def test_four_fits_in_four_threads_save_as_one_alone_does(tmp_path, repeats: int) -> None:
    expected = digest(fit(tmp_path / "alone"))
    for i in range(repeats):
        places = [tmp_path / f"{i}-{k}" for k in range(4)]
        results = in_threads(*(lambda place=place: fit(place) for place in places))
        assert [digest(found) for found in results] == [expected] * 4
        for place in places:
            assert ft.Checkpointer(place).verify() == {}


@pytest.mark.parametrize("repeats", [2, pytest.param(50, marks=pytest.mark.long)])
def test_a_hook_saves_elsewhere_while_the_checkpointer_writes(tmp_path, repeats: int) -> None:
    for i in range(repeats):
        saved: list[tuple[pathlib.Path, Any]] = []

        def save_elsewhere(event: Any, i: int = i, saved: Any = saved) -> None:
            saved.append((tmp_path / f"{i}-elsewhere{len(saved)}", digest(event.state)))
            ft.save(saved[-1][0], event.state)

        state = fit(tmp_path / f"{i}-run", save_elsewhere)
        assert len(saved) > 4
        for place, expected in saved:
            assert digest(ft.load(place, state)) == expected


def test_threads_that_save_with_one_checkpointer_take_turns(tmp_path: pathlib.Path) -> None:
    with ft.Checkpointer(tmp_path, keep=None) as checkpoints:

        def save() -> None:
            for step in range(12):
                with contextlib.suppress(ValueError):  # another thread has saved a later step
                    checkpoints.save({"w": np.full(300_000, step)}, step, wait=step % 2 == 0)

        assert in_threads(save, save, save) == [None] * 3
    assert checkpoints.verify() == {}
    assert checkpoints.latest() == 11


def test_the_error_of_a_save_is_raised_by_it_and_not_by_that_of_another_thread(
    tmp_path, monkeypatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError("the disk is full")

    checkpoints = ft.Checkpointer(tmp_path)

    class Turns(contextlib.ExitStack):
        def __exit__(self, *_: object) -> None:
            with contextlib.suppress(OSError):
                checkpoints.wait()  # as the save of another thread, whose turn it is now

    monkeypatch.setattr(_checkpoint, "write_checkpoint", full_disk)
    monkeypatch.setattr(checkpoints, "_save_lock", Turns())
    with pytest.raises(OSError, match="the disk is full"):
        checkpoints.save({"w": np.zeros(3)}, 1)
    checkpoints.close()


def test_a_checkpoint_that_is_replaced_while_it_is_verified_is_not_called_damaged(
    tmp_path, monkeypatch
) -> None:
    read = StoredArrays.read
    with ft.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save({"w": np.zeros(3)}, 1)

        def read_too_late(*arguments: Any) -> Any:
            monkeypatch.setattr(StoredArrays, "read", read)
            checkpoints.save({"w": np.ones(3)}, 1)
            return read(*arguments)

        monkeypatch.setattr(StoredArrays, "read", read_too_late)
        assert checkpoints.verify() == {}


def test_a_thread_that_cannot_begin_is_an_error_and_not_waited_for(monkeypatch) -> None:
    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    background = _writer.Writer()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            background.start(lambda: None)
    background.wait()


def test_ctrl_c_while_the_thread_of_a_save_begins_loses_neither_the_save_nor_its_error(
    monkeypatch,
) -> None:
    begun, released = threading.Event(), threading.Event()
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        assert begun.wait(60)
        raise KeyboardInterrupt

    def work() -> None:
        begun.set()
        assert released.wait(60)
        raise OSError("the disk is full")

    background = _writer.Writer()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            background.start(work)
    assert background.is_busy
    released.set()
    with pytest.raises(OSError, match="the disk is full"):
        background.wait()
    assert not background.is_busy
