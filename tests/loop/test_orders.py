"""The orders of a loader in several fits, one after the other."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from tests.conftest import digest

IDS = np.arange(14, dtype=np.int32)
LOADER = ft.ArrayLoader(IDS, 2, shuffle=True, seed=3)  # seven batches an epoch
PARAMS = {"w": np.zeros(2, np.float32)}
TX = optax.sgd(0.1, momentum=0.9)


def loss_fn(params: Any, model_state: Any, ids: Any, *, rng: Any, training: bool) -> Any:
    loss = jnp.sum((params["w"] - ids + jax.random.normal(rng)) ** 2)
    return loss, ft.Aux(model_state, logs={"first": ids[0], "second": ids[1]})


STEP = ft.train_step(loss_fn, TX)


def start() -> ft.TrainState:
    return ft.TrainState.create(params=PARAMS, tx=TX, rng=jax.random.key(0))


def fit(state: Any, data: Any = LOADER, step: Any = STEP, **how: Any) -> Any:
    """Returns the state and the ids that were seen, `[steps, 2]`."""
    state, history = ft.fit(state, step, data, verbose=0, fuse=4, **how)
    return state, np.stack([history.steps["first"], history.steps["second"]], 1).astype(int)


def orders(*epochs: int) -> list[list[int]]:
    return [LOADER.order(epoch).tolist() for epoch in epochs]


def epochs_of(ids: np.ndarray) -> list[list[int]]:
    return ids.reshape(-1, len(IDS)).tolist()


def test_a_loop_of_fits_sees_the_orders_of_one_fit_and_trains_to_the_same_bits() -> None:
    expected, seen_by_one = fit(start(), epochs=3)
    state, seen = start(), []
    for _ in range(3):
        state, ids = fit(state, epochs=1)
        seen += epochs_of(ids)
    assert seen == orders(0, 1, 2) == epochs_of(seen_by_one)
    assert digest(state) == digest(expected)


@pytest.mark.parametrize("steps", [3, 7, 10])
def test_a_loop_of_fits_by_steps_takes_the_batches_of_one_fit(steps: int) -> None:
    expected, seen_by_one = fit(start(), steps=3 * steps)
    state, seen = start(), []
    for _ in range(3):
        state, ids = fit(state, steps=steps)
        seen.append(ids)
    np.testing.assert_array_equal(np.concatenate(seen), seen_by_one)
    assert digest(state) == digest(expected)


def test_an_epoch_is_whole_after_a_part_of_one() -> None:
    part, _ = fit(start(), steps=3)
    assert epochs_of(fit(part, epochs=2)[1]) == orders(1, 2)


def test_a_start_says_otherwise() -> None:
    state, _ = fit(start(), epochs=1)
    assert epochs_of(fit(state, epochs=1, start=ft.Position())[1]) == orders(0)
    assert epochs_of(fit(state, epochs=3, start=ft.Position(7, 1))[1]) == orders(1, 2)
    assert fit(state, steps=9, start=ft.Position(7))[1].ravel().tolist() == orders(1)[0][:4]


@pytest.mark.parametrize("how", [{"epochs": 3}, {"steps": 20, "steps_per_epoch": 10}], ids=str)
@pytest.mark.parametrize("end", [3, 7, 10, 16])
def test_a_checkpoint_keeps_the_orders_whatever_state_it_is_resumed_with(
    end: int, how: Any, tmp_path: pathlib.Path
) -> None:
    trained, _ = fit(start(), steps=9)
    expected, seen = fit(trained, **how)
    assert seen.ravel().tolist() != fit(start(), **how)[1].ravel().tolist()

    @ft.at(end)
    def power_cut(event: Any) -> None:
        raise InterruptedError

    every = ft.every(steps=1 if end == 7 else 5)
    with pytest.raises(InterruptedError):
        fit(trained, hooks=[power_cut], checkpointer=ft.Checkpointer(tmp_path, every=every), **how)
    began = start() if ft.Checkpointer(tmp_path).latest() else trained
    found, ids = fit(began, checkpointer=ft.Checkpointer(tmp_path), **how)
    np.testing.assert_array_equal(ids, seen)
    assert digest(found) == digest(expected)


def test_more_epochs_of_a_finished_fit_continue_with_its_orders(tmp_path: pathlib.Path) -> None:
    trained, _ = fit(start(), epochs=2)
    fit(trained, epochs=1, checkpointer=ft.Checkpointer(tmp_path))
    _, ids = fit(trained, epochs=2, checkpointer=ft.Checkpointer(tmp_path))
    assert epochs_of(ids) == orders(2, 3)


def look(state: Any, ids: Any) -> Any:
    return state, {"first": ids[0], "second": ids[1]}


@pytest.mark.parametrize("state", [{"step": jnp.int32(7)}, jnp.zeros(())], ids=["dict", "array"])
def test_a_state_without_a_count_of_its_own_begins_with_the_first_order(state: Any) -> None:
    assert epochs_of(fit(state, step=look)[1]) == orders(0)


def test_data_that_cannot_be_sought_begin_as_they_do_by_themselves() -> None:
    batches = [IDS[i : i + 2] for i in range(0, 14, 2)]
    state = start().replace(step=jnp.int32(9))
    assert epochs_of(fit(state, batches)[1]) == [IDS.tolist()]
    assert fit(state, batches, steps=3)[1].ravel().tolist() == IDS[:6].tolist()
