"""Members that take all steps of a program before the next ones, to stay on the chip of a TPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft
from functrain.common._platform import compiling_for
from functrain.engine._plan import nbytes
from functrain.engine._programs import TRAINING, LoopOptions, program
from functrain.population import _blocks
from functrain.population._blocks import copy_onto_chip, count_blocks
from functrain.targets._chips import known_chip
from tests.workload_parts import parts

from .setting import (
    KEY,
    MEMBERS,
    METERED,
    PLAIN,
    X,
    Y,
    alone,
    assert_close,
    bits,
    of_all,
    population,
)

K = 4
SHARED = (X[: K * 8].reshape(K, 8, 8), Y[: K * 8].reshape(K, 8))
# Every member gets the batches in another order.
PER_MEMBER = jax.tree.map(lambda x: np.stack([x, x[::-1], x[[1, 0, 3, 2]]], axis=1), SHARED)


def train(step: Any, chunk: Any, steps: int, on_chip_bytes: int) -> Any:
    """Takes steps with a population of three, on a device with this memory on the chip."""
    options = LoopOptions(K, "off", "cpu", donate=False, on_chip_bytes=on_chip_bytes)
    run = program(step, TRAINING, options)
    return run(step.start(population()), chunk, np.int32(steps))[:2]


@pytest.mark.parametrize("steps", [K, 2])
@pytest.mark.parametrize(("data", "chunk"), [("shared", SHARED), ("per_member", PER_MEMBER)])
def test_blocks_of_members_train_as_all_members_at_once(data, chunk, steps) -> None:
    step = of_all(METERED, data=data)
    size = int(0.6 * nbytes(step.start(population())))
    assert count_blocks(step.start(population()), size) == 3
    carry, rows = train(step, chunk, steps, on_chip_bytes=size)
    expected, expected_rows = train(step, chunk, steps, on_chip_bytes=0)
    assert_close(carry, expected)
    assert_close(rows, expected_rows)
    assert np.ptp(rows["loss"][:steps], axis=1).all(), "members are in their own columns"


def test_blocks_are_as_few_as_stay_on_the_chip() -> None:
    state = {"w": jnp.zeros((12, 100)), "active": jnp.zeros(12, bool)}
    room = int(12 * 401 / _blocks.STATE_PART)
    rooms = (room + 2, room // 2 + 2, room // 3 + 2, room // 5 + 2, room // 7 + 2)
    assert [count_blocks(state, x) for x in rooms] == [1, 2, 3, 6, 12]


def test_a_number_of_members_without_fitting_divisors_is_not_divided() -> None:
    assert count_blocks(jnp.zeros((13, 100)), on_chip_bytes=13 * 400) == 1


def test_large_leaves_of_a_state_that_fits_are_copied(monkeypatch) -> None:
    monkeypatch.setattr(_blocks, "MIN_COPIED_BYTES", 400)
    state = {"large": jnp.linspace(-1, 1, 100).at[3].set(jnp.nan), "small": jnp.arange(3.0)}
    copied = jax.jit(lambda state, n: copy_onto_chip(state, n, 1200))
    assert bits(copied(state, 0)) == bits(state)
    assert str(jax.make_jaxpr(copied)(state, 0)).count("select_n") == 1
    too_small = jax.make_jaxpr(lambda state, n: copy_onto_chip(state, n, 400))(state, 0)
    assert "select_n" not in str(too_small)


@pytest.mark.parametrize("block", [None, 2])
def test_members_with_repeated_labels_train_as_they_would_alone(block: int | None) -> None:
    batch = X[:16], Y[:16]
    with compiling_for("tpu"):
        new, logs = jax.jit(ft.population.step(PLAIN, block=block))(population(), batch)
    for i in range(MEMBERS):
        state, expected = jax.jit(PLAIN)(alone(i), batch)
        assert_close(new[i], state)
        np.testing.assert_allclose(logs["loss"][i], expected["loss"], rtol=1e-6)


@pytest.mark.parametrize(("platform", "count"), [("tpu", 1), ("gpu", 0), ("cpu", 0)])
def test_labels_are_repeated_for_the_members_of_a_tpu(platform: str, count: int) -> None:
    batch = {"x": X[:16], "y": Y[:16], "nothing": None, "keys": jax.random.split(KEY, 16)}
    step = ft.population.step(lambda state, batch: PLAIN(state, (batch["x"], batch["y"])))
    with compiling_for(platform):
        found = str(jax.make_jaxpr(lambda *args: step(*args))(population(), batch))
    assert found.count("optimization_barrier") == count
    assert (f"i32[{MEMBERS},16]" in found.split("optimization_barrier")[0]) == (count == 1)


@pytest.mark.tpu
def test_the_members_of_a_population_pick_a_logit_as_one_member_does() -> None:
    assert cycles("digits-mlp", 32) <= 2.4 * cycles("digits-mlp", 1)


def cycles(name: str, members: int) -> float:
    """Returns the estimated cycles of a step on a v5e, without a population for 0 members."""
    metered, step, batch = parts(name)
    state = metered.state
    if members:
        state, step = ft.population.stack([state] * members), ft.population.step(step)
    cost = ft.inspect.cost(state, step, batch, fuse=32, target=ft.target("tpu:v5e"))
    return cost.seconds * cost.chip.clock_hz


@pytest.mark.tpu
def test_members_that_do_not_fit_on_the_chip_cost_as_much_as_those_that_fit() -> None:
    assert known_chip("TPU v5 lite").on_chip_bytes == 128 * 2**20
    assert cycles("mnist-mlp", 256) <= 2.2 * cycles("mnist-mlp", 128)


@pytest.mark.tpu
def test_twice_the_members_cost_less_than_twice_as_much() -> None:
    # Without the copies before the loop, 32 members cost three times as much as 16.
    assert cycles("mnist-mlp", 32) <= 2 * cycles("mnist-mlp", 16)
