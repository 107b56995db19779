"""Ctrl-C and SIGTERM wait for the program under way."""

import signal
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
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


def inner_fit() -> None:
    ft.fit(jnp.zeros(()), step, interrupted(20), fuse=2, verbose=0)


def inner_evaluate() -> None:
    loss = lambda params, state, batch, *, rng, training: (batch.sum(), ft.Aux(state))  # noqa: E731
    ft.evaluate(STATE, ft.eval_step(loss), interrupted(20), fuse=2)


def inner_predict() -> None:
    ft.predict(STATE, ft.predict_step(MODEL), interrupted(20), fuse=2)


STATE = ft.TrainState.create(params={"w": jnp.ones(())}, tx=optax.sgd(0.1))
MODEL = ft.Model(
    init=lambda key, x: ({"w": jnp.zeros(())}, {}),
    apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x * p["w"], s),
)
fetched: list[int] = []


def interrupted(count: int) -> Any:
    """Data in which Ctrl-C is pressed."""
    fetched.clear()
    for i in range(count):
        fetched.append(i)
        if i == 5:
            signal.raise_signal(signal.SIGINT)
        yield np.full(2, i, np.float32)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("inner", [inner_fit, inner_evaluate, inner_predict])
def test_ctrl_c_ends_what_a_hook_runs(inner) -> None:
    hook = ft.at(6)(lambda event: inner())
    with pytest.raises(KeyboardInterrupt) as caught:
        ft.fit(jnp.zeros(()), step, LOADER, fuse=4, hooks=[hook], verbose=0)
    assert len(fetched) < 10
    state, history = caught.value.fit_result
    assert len(history.steps["total"]) == 6
    assert float(state) == np.arange(12).sum()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("inner", [inner_fit, inner_evaluate, inner_predict])
def test_a_fit_that_saves_itself_waits_for_an_evaluation_but_not_for_a_fit(inner, tmp_path) -> None:
    hook = ft.at(6)(lambda event: inner())
    saves = ft.Checkpointer(tmp_path, every=4)
    with pytest.raises(KeyboardInterrupt):
        ft.fit(jnp.zeros(()), step, LOADER, fuse=4, hooks=[hook], verbose=0, checkpointer=saves)
    if inner is inner_fit:
        assert len(fetched) < 10
        assert saves.latest() == 4
    else:
        assert len(fetched) == 20
        assert saves.latest() == 6
    again = ft.fit(jnp.zeros(()), step, LOADER, fuse=4, verbose=0, checkpointer=saves)
    assert float(again.state) == np.arange(40).sum()
