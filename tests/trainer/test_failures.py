"""A program that fails says why, and what was trained before it is not lost."""

import collections
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain.engine import _driver
from tests import fork_server

X = np.arange(40, dtype=np.float32)
LOADER = ft.ArrayLoader(X, 2)


def failing(at: int) -> Any:
    """A step whose host callback raises at a batch."""

    def check(x: Any) -> None:
        if x == at:
            raise RuntimeError("from the host")

    def step(state: Any, batch: Any) -> Any:
        jax.debug.callback(check, batch[0])
        return {"w": state["w"] + batch.sum()}, {"w": state["w"]}

    return step


def fitted(step: Any, **how: Any) -> Any:
    return ft.fit({"w": jnp.zeros(())}, step, LOADER, verbose=0, **how)


@pytest.mark.parametrize("fuse", [1, 4])
def test_an_error_within_a_program_is_raised_as_it_is_with_the_last_whole_state(
    fuse, monkeypatch
) -> None:
    monkeypatch.setattr(_driver, "SPARE_SECONDS", 0.0)  # a copy after every program
    with pytest.raises(Exception, match="from the host") as caught:
        fitted(failing(at=20), fuse=fuse)
    assert "earlier program" not in str(caught.value)
    state, history = caught.value.fit_result
    taken = len(history.steps["w"])
    assert 0 < taken <= 10
    assert taken % fuse == 0
    assert float(state["w"]) == X[: 2 * taken].sum()
    assert any(f"after step {taken}" in note for note in caught.value.__notes__)


def test_where_nothing_was_trained_nothing_is_promised() -> None:
    with pytest.raises(Exception, match="from the host") as caught:
        fitted(failing(at=0), fuse=4)
    assert not hasattr(caught.value, "fit_result")
    assert not any("fit_result" in note for note in getattr(caught.value, "__notes__", []))

    def no_step(state: Any, batch: Any) -> Any:
        raise ValueError("not a step")

    with pytest.raises(ValueError, match="not a step") as caught:
        fitted(no_step)
    assert not hasattr(caught.value, "fit_result")


def test_of_a_state_too_large_to_copy_the_note_says_what_is_lost(monkeypatch) -> None:
    monkeypatch.setattr(_driver, "SPARE_BYTES", 0)
    with pytest.raises(Exception, match="from the host") as caught:
        fitted(failing(at=20), fuse=4)
    assert not hasattr(caught.value, "fit_result")
    assert any("was donated to it" in note for note in caught.value.__notes__)


def test_an_owner_of_the_loop_gets_the_last_whole_state_too(monkeypatch) -> None:
    monkeypatch.setattr(_driver, "SPARE_SECONDS", 0.0)
    events = ft.run({"w": jnp.zeros(())}, failing(at=20), LOADER, fuse=2)
    with pytest.raises(Exception, match="from the host"):
        collections.deque((jax.block_until_ready(event.state) for event in events), maxlen=0)
    state, position = events.last_complete_state()
    assert position.step == 10
    assert float(state["w"]) == X[:20].sum()


def test_history_and_state_of_an_error_are_of_one_step() -> None:
    @ft.at(6)
    def fails(event: Any) -> None:
        raise OSError("disk full")

    step = failing(at=-1)
    with pytest.raises(OSError, match="disk full") as caught:
        fitted(step, fuse=4, hooks=[fails])
    state, history = caught.value.fit_result
    assert len(history.steps["w"]) == 6
    assert float(state["w"]) == X[:12].sum()


def test_a_fused_program_that_fails_says_why() -> None:
    fused = ft.fuse(failing(at=0), 2)
    chunk = LOADER.chunk(0, 0, 2)
    with pytest.raises(Exception, match="from the host"):
        jax.block_until_ready(fused({"w": jnp.zeros(())}, chunk))


def test_a_forked_child_is_told_before_it_hangs() -> None:
    program = """
import os, sys, warnings, jax.numpy as jnp, numpy as np, functrain as ft
warnings.simplefilter("ignore")
fit = lambda: ft.fit(jnp.zeros(()), lambda s, x: (s + x.sum(), {}), [np.ones(2)], verbose=0)
fit()
if (child := os.fork()) == 0:
    try:
        fit()
    except RuntimeError as error:
        os._exit(7 if "spawn" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = fork_server.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "7", done.stderr


def test_without_compiling_too_history_and_state_of_an_error_are_of_one_step() -> None:
    def step(state: Any, batch: Any) -> Any:
        if batch[0] == 26:
            raise RuntimeError("in mid-chunk")
        return {"w": state["w"] + 1}, {"w": state["w"]}

    with pytest.raises(RuntimeError, match="in mid-chunk") as caught:
        fitted(step, fuse=8, jit=False)
    state, history = caught.value.fit_result
    assert float(state["w"]) == len(history.steps["w"]) == 8


def test_an_error_while_logs_are_told_leaves_state_and_history_of_one_step() -> None:
    class Full:
        def __call__(self, event: Any) -> None:
            pass

        def logs(self, event: Any) -> None:
            if event.step == 8:
                raise OSError("no space left")

    step = lambda state, batch: ({"w": state["w"] + 1}, {"w": state["w"]})  # noqa: E731
    with pytest.raises(OSError, match="no space left") as caught:
        fitted(step, fuse=4, hooks=[Full()])
    state, history = caught.value.fit_result
    assert float(state["w"]) == len(history.steps["w"]) == 12
