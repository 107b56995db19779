"""Ctrl-C and SIGTERM wait for the program under way."""

import signal
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain.internal import DeferredSignals

LOADER = ft.ArrayLoader(np.arange(40, dtype=np.float32), 2)


def step(state: Any, batch: Any) -> Any:
    return state + batch.sum(), {"total": state}


@pytest.fixture
def sigterm_exits():
    """What many programs do with SIGTERM."""

    def leave(number: int, frame: Any) -> None:
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)


def at_step(n: int, number: signal.Signals) -> Any:
    return ft.at(n)(lambda event: signal.raise_signal(number))


@pytest.mark.usefixtures("sigterm_exits")
def test_a_sigterm_that_exits_waits_for_the_program_and_loses_nothing() -> None:
    with pytest.raises(SystemExit) as caught:
        ft.fit(jnp.zeros(()), step, LOADER, fuse=4, hooks=[at_step(6, signal.SIGTERM)], verbose=0)
    assert caught.value.code == 143
    state, history = caught.value.fit_result
    assert len(history.steps["total"]) == 6
    assert float(state) == np.arange(12).sum()


@pytest.mark.usefixtures("sigterm_exits")
def test_a_sigterm_in_mid_program_waits_too() -> None:
    """Data come from a loop of Python's, in the midst of which a signal may come."""

    def batches() -> Any:
        for i in range(20):
            if i == 5:
                signal.raise_signal(signal.SIGTERM)
            yield np.full(2, i, np.float32)

    with pytest.raises(SystemExit) as caught:
        ft.fit(jnp.zeros(()), step, batches(), fuse=4, verbose=0)
    state, history = caught.value.fit_result
    assert len(history.steps["total"]) == 8
    assert float(state) == 2 * np.arange(8).sum()


@pytest.mark.usefixtures("sigterm_exits")
def test_a_second_signal_does_not_wait() -> None:
    def batches() -> Any:
        for i in range(20):
            if i == 5:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)
                raise AssertionError("it waited")
            yield np.full(2, i, np.float32)

    with pytest.raises(SystemExit):
        ft.fit(jnp.zeros(()), step, batches(), fuse=4, verbose=0)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_says_that_it_was_heard(capsys) -> None:
    with pytest.raises(KeyboardInterrupt):
        ft.fit(jnp.zeros(()), step, LOADER, fuse=4, hooks=[at_step(6, signal.SIGINT)], verbose=0)
    assert "Press Ctrl-C again to stop at once" in capsys.readouterr().err


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("place", [4, 5])
def test_an_error_of_workers_that_ctrl_c_ended_is_a_ctrl_c(place) -> None:
    def batches() -> Any:
        for i in range(20):
            if i == place:
                signal.raise_signal(signal.SIGINT)
                raise RuntimeError("worker process was killed")
            yield np.full(2, i, np.float32)

    with pytest.raises(KeyboardInterrupt) as caught:
        ft.fit(jnp.zeros(()), step, batches(), fuse=4, verbose=0)
    assert len(caught.value.fit_result.history.steps["total"]) == place


@pytest.mark.usefixtures("ctrl_c", "sigterm_exits")
def test_signals_belong_to_their_handlers_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    ft.fit(jnp.zeros(()), step, LOADER, verbose=0)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_while_handlers_are_restored_comes_after_that(monkeypatch, ctrl_c) -> None:
    restore = DeferredSignals._previous_handler

    def interrupted(self: DeferredSignals, number: int) -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return restore(self, number)

    with pytest.raises(KeyboardInterrupt), DeferredSignals():
        monkeypatch.setattr(DeferredSignals, "_previous_handler", interrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
