"""What a history keeps in memory and in checkpoints, and across resumes."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain.trainer._recorder import Recorder

LOADER = ft.ArrayLoader(np.linspace(-1, 1, 35, dtype=np.float32), 4, shuffle=True)  # 9 steps
START = {"w": np.zeros(3, np.float32)}


def step(state: Any, batch: Any) -> Any:
    w = state["w"] * 0.9 + jnp.mean(batch)
    return {"w": w}, {"loss": jnp.sum(w**2), "learning_rate": jnp.max(w)}


@ft.every(steps=5)
def add_point(event: Any) -> None:
    event.values["norm"] = float(event.state["w"][0])


def fit(*hooks: Any, **how: Any) -> ft.History:
    how = {"epochs": 4, "fuse": 4, "verbose": 0, "hooks": [add_point, *hooks], **how}
    return ft.fit(START, step, LOADER, **how).history


def without_seconds(history: ft.History) -> dict[str, list[float]]:
    return {name: x.tolist() for name, x in history.epochs.items() if name != "seconds"}


def power_cut(step: int) -> Any:
    @ft.at(step)
    def cut(event: Any) -> None:
        raise InterruptedError

    return cut


def test_a_history_of_epochs_has_the_same_epochs_and_nothing_else() -> None:
    whole, epochs = fit(), fit(history="epochs")
    assert without_seconds(epochs) == without_seconds(whole)
    assert set(whole.steps) == {"loss", "learning_rate"}
    assert set(whole.within_epochs) == {"norm"}
    assert (epochs.steps, epochs.within_epochs) == ({}, {})
    with pytest.raises(ValueError, match="history: expected 'steps' or 'epochs', got 'epoch'"):
        fit(history="epoch")


def test_with_epochs_alone_neither_memory_nor_checkpoints_grow_with_the_steps(
    tmp_path: pathlib.Path,
) -> None:
    def numbers_saved(at: int) -> int:
        state = checkpointer.restore(START, at).documents["history"]
        del state["epochs"]
        return sum(map(np.size, jax.tree.leaves(state)))

    checkpointer = ft.Checkpointer(tmp_path, every=ft.every(steps=3), keep=None)
    fit(epochs=12, history="epochs", checkpointer=checkpointer)
    sizes = [numbers_saved(at) for at in checkpointer.steps()]
    assert sizes[0] == sizes[3] == sizes[-3]  # three steps into an epoch
    assert sizes[2] == sizes[5] == sizes[-4]  # at its last step
    assert sizes[-1] < sizes[0]  # after its end

    recorder = Recorder(keeps_steps=False)
    logs = {"loss": np.zeros(4, np.float32)}
    held = []
    for epoch in range(50):
        at = ft.Position(4 * epoch + 4, epoch, 4)
        recorder.logs(ft.events.ChunkEnd(position=at, state=(), steps=4, examples=1, rows=logs))
        event = ft.events.ChunkEnd(position=at, state=(), steps=4, examples=1, rows={})
        event.values["point"] = 1.0
        recorder.after(event)
        recorder.before(ft.events.EpochEnd(position=at, state=()))
        parts = [*recorder._parts, *recorder._epoch_parts]
        held.append((len(parts), len(recorder._within_epochs)))
    assert held == [(0, 0)] * 50


@pytest.mark.parametrize("at", [4, 9, 11, 30])
def test_a_history_of_epochs_resumes_in_the_middle_of_one(at: int, tmp_path: pathlib.Path) -> None:
    def checkpointer() -> ft.Checkpointer:
        return ft.Checkpointer(tmp_path, every=ft.every(steps=1))

    with pytest.raises(InterruptedError) as caught:
        fit(power_cut(at), history="epochs", checkpointer=checkpointer())
    assert caught.value.fit_result.history.steps == {}
    resumed = fit(history="epochs", checkpointer=checkpointer())
    assert without_seconds(resumed) == without_seconds(fit())
    assert (resumed.steps, resumed.within_epochs) == ({}, {})


def test_a_resumed_fit_may_keep_more_or_less(tmp_path: pathlib.Path) -> None:
    def resumed(first: Any, second: Any) -> ft.History:
        checkpointer = ft.Checkpointer(tmp_path / first, every=ft.every(steps=1))
        with pytest.raises(InterruptedError):
            fit(power_cut(21), history=first, checkpointer=checkpointer)
        return fit(history=second, checkpointer=checkpointer)

    whole = fit()
    fewer = resumed("steps", "epochs")
    assert without_seconds(fewer) == without_seconds(whole)
    assert (fewer.steps, fewer.within_epochs) == ({}, {})
    more = resumed("epochs", "steps")
    assert without_seconds(more) == without_seconds(whole)
    assert more.first_step == 18  # from the beginning of the epoch in which it was resumed
    np.testing.assert_array_equal(more.steps["loss"], whole.steps["loss"][18:])
    assert more.within_epochs["norm"][0].tolist() == [25, 30, 35]


def test_the_seconds_of_the_first_steps_are_those_of_the_process_that_takes_them() -> None:
    def take_logs(recorder: Recorder) -> None:
        logs = {"loss": np.zeros(1, np.float32)}
        at = ft.Position(1)
        recorder.logs(ft.events.ChunkEnd(position=at, state=(), steps=1, examples=1, rows=logs))

    slow = Recorder()
    slow._start_time -= 23.8  # the first process compiled for long
    take_logs(slow)
    assert slow.history().first_steps_seconds >= 23.8

    resumed = Recorder()
    resumed.restore(slow.state())
    assert resumed.history().first_steps_seconds >= 23.8  # where no step is left to take
    resumed._start_time -= 3.2
    take_logs(resumed)
    assert 3.2 <= resumed.history().first_steps_seconds < 23.8
