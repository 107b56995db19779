"""A fit of no epochs."""

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft


def step(state: Any, batch: Any) -> Any:
    return state + batch.sum(), {"sum": batch.sum()}


@pytest.mark.parametrize("data", [ft.ArrayLoader(np.ones(10), 3), [np.ones(3)], ft.NoData(3)])
@pytest.mark.parametrize("donate", [False, True])
def test_a_fit_of_no_epochs_returns_the_state_and_an_empty_history(data: Any, donate: bool) -> None:
    events = []
    state, history = ft.fit(
        jnp.float32(7), step, data, epochs=0, hooks=[events.append], donate=donate, verbose=0
    )
    assert float(state) == 7.0
    assert (history.steps, history.epochs) == ({}, {})
    assert [type(event) for event in events] == [ft.events.RunEnd]
    assert [type(event) for event in ft.run(state, step, data, epochs=0)] == [ft.events.RunEnd]


def test_a_fit_of_no_epochs_saves_nothing_and_does_not_undo_another(tmp_path: pathlib.Path) -> None:
    def fit(epochs: int) -> Any:
        saves = ft.Checkpointer(tmp_path)
        return ft.fit(0.0, step, [np.ones(3)], epochs=epochs, checkpointer=saves, verbose=0).state

    assert float(fit(0)) == 0.0
    assert float(fit(2)) == 6.0
