import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain.inspect._autotune import TuningRow, _choose


def step(state, batch):
    return {"w": state["w"] + jnp.mean(batch)}, {"loss": jnp.sum(batch)}


@pytest.mark.smoke
def test_the_state_is_neither_changed_nor_consumed() -> None:
    state = {"w": jnp.zeros(3)}
    tuning = ft.inspect.autotune(state, step, np.ones((4, 2), np.float32), fuse=(1, 4))
    assert state["w"].tolist() == [0, 0, 0]
    assert [row.k for row in tuning.rows] == [0, 1, 4]
    assert [row.chunk_bytes for row in tuning.rows] == [32, 32, 128]
    assert all(row.microseconds > 0 for row in tuning.rows)
    assert re.search(r"\n +(1|4)\*", str(tuning))
    assert repr(tuning) == str(tuning)


def test_a_chunk_beyond_the_memory_is_not_tried() -> None:
    tuning = ft.inspect.autotune(
        {"w": jnp.zeros(3)}, step, np.ones(8, np.float32), fuse=(1, 4), memory=64
    )
    assert [row.k for row in tuning.rows] == [0, 1]


def test_out_of_time_no_further_k_is_tried() -> None:
    tuning = ft.inspect.autotune(
        {"w": jnp.zeros(3)}, step, np.ones(8, np.float32), fuse=(2, 4), seconds=0
    )
    assert [row.k for row in tuning.rows] == [0, 2]


def test_steps_with_metrics_can_be_tuned() -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        return jnp.mean(params["w"] * batch[0]), ft.Aux(model_state, batch[0])

    tx = optax.sgd(0.1)
    metered = ft.train_step(loss_fn, tx, metrics={"mae": ft.metrics.mean_absolute_error()})
    state = ft.TrainState.create(params={"w": np.float32(1)}, tx=tx)
    x = np.ones((4, 1), np.float32)
    for begun in (state, metered.start(state)):
        tuning = ft.inspect.autotune(begun, metered, (x, x), fuse=(2,))
        assert [row.k for row in tuning.rows] == [0, 2]


@pytest.mark.parametrize(
    ("microseconds", "choice"),
    [
        ([100, 90, 50, 49.5], 4),  # within the noise, the smaller chunk
        ([100, 90, 50, 30], 16),
        ([100, 101, 120, 130], 1),
        ([50, 100, 90, 80], 16),  # fit cannot run the plain step, whatever its time
    ],
)
def test_the_choice_is_the_smallest_of_the_fastest(microseconds, choice) -> None:
    rows = [TuningRow(k, us, 0.0, 0) for k, us in zip((0, 1, 4, 16), microseconds, strict=True)]
    assert _choose(rows) == choice


@pytest.mark.parametrize("ks", [(), (0, 1), (4, 2), 16, "auto", (1.5, 2)])
def test_numbers_of_steps_must_rise(ks) -> None:
    with pytest.raises(ValueError, match="fuse: expected rising numbers of steps"):
        ft.inspect.autotune({"w": jnp.zeros(3)}, step, np.ones(8), fuse=ks)
