"""A program that fails says why, and what was trained before it is not lost."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

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


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("fuse", [1, 4])
def test_the_note_of_a_program_that_fails_names_the_last_checkpoint(fuse, donate, tmp_path) -> None:
    state, saves = {"w": jnp.zeros(())}, ft.Checkpointer(tmp_path, every=4)
    how: Any = {"fuse": fuse, "verbose": 0, "checkpointer": saves, "donate": donate}
    with pytest.raises(Exception, match="from the host") as caught:
        ft.fit(state, failing(at=20), LOADER, **how)
    assert not hasattr(caught.value, "fit_result")
    notes = "\n".join(caught.value.__notes__)
    assert "had consumed the state" in notes
    assert f"resumes after step 8: {tmp_path}" in notes
    assert state["w"].is_deleted() == donate
    resumed = ft.fit({"w": jnp.zeros(())}, failing(at=-1), LOADER, **how)
    assert float(resumed.state["w"]) == X.sum()


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


@pytest.mark.parametrize("how", [{"fuse": 2}, {"fuse": 4, "jit": False}], ids=str)
def test_an_owner_of_the_loop_gets_the_last_state_after_an_error_of_the_data(how) -> None:
    def data() -> Any:
        yield from X[:20].reshape(10, 2)
        raise OSError("a file is missing")

    step = lambda state, batch: ({"w": state["w"] + batch.sum()}, {})  # noqa: E731
    events = ft.run({"w": jnp.zeros(())}, step, data(), **how)
    with pytest.raises(OSError, match="a file is missing"):
        collections.deque(events, maxlen=0)
    state, position = events.last_complete_state()
    assert position == ft.Position(10, 0, 10)
    assert float(state["w"]) == X[:20].sum()


def test_an_owner_of_the_loop_is_told_that_a_program_that_failed_left_no_state() -> None:
    events = ft.run({"w": jnp.zeros(())}, failing(at=20), LOADER, fuse=2)
    with pytest.raises(Exception, match="from the host"):
        collections.deque((jax.block_until_ready(event.state) for event in events), maxlen=0)
    assert events.last_complete_state() is None


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
