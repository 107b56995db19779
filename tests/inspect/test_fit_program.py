"""The program that reports are about, and its devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import functrain as ft
from functrain.inspect._fit_program import lower_fit

BATCH = np.ones((8, 4), np.float32)


def step(state: Any, batch: Any) -> Any:
    return state + jnp.mean(batch), {}


def test_what_is_no_target_is_refused() -> None:
    message = r"target: expected a target .*, got 'tpu:v5e'. Call functrain.target"
    for report in (ft.inspect.memory, ft.inspect.cost, ft.inspect.largest_batch):
        with pytest.raises(TypeError, match=message):
            report(jnp.zeros(2), step, BATCH, target="tpu:v5e")  # type: ignore[operator]


@pytest.fixture
def first_device() -> ft.Target:
    here = ft.target()
    return dataclasses.replace(here, name="first", devices=here.devices[:1])


def test_an_array_that_was_put_on_a_device_stays_there_without_a_target() -> None:
    second = jax.devices()[1]
    state = {"put": jax.device_put(jnp.zeros(2), second), "free": jnp.zeros(2)}
    program = lower_fit(state, lambda state, batch: (state, {}), BATCH)
    assert program.carry["put"].sharding.device_set == {second}
    assert program.carry["free"].sharding is None
    carried = program.lowered.compile().input_shardings[0][0]
    assert carried["free"].device_set == {second}


@pytest.mark.parametrize("has_target", [True, False])
def test_what_has_no_place_is_replicated_over_the_mesh_of_the_state(has_target: bool) -> None:
    here = ft.target()
    on_mesh = NamedSharding(here.mesh({"data": -1}), P("data"))
    state = {"divided": jax.device_put(jnp.zeros(2), on_mesh), "free": jnp.zeros(2)}

    def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        outputs = jnp.zeros(8) + params["divided"].sum() * params["free"].sum()
        return outputs.mean(), ft.Aux(model_state, outputs=outputs)

    metrics: Any = {"mae": ft.metrics.mean_absolute_error()}
    step = ft.train_step(loss_fn, optax.sgd(0.1), metrics=metrics)
    train_state = ft.TrainState.create(params=state, tx=optax.sgd(0.1))
    batch = BATCH, np.ones(8, np.float32)
    found = ft.inspect.memory(train_state, step, batch, fuse=2, target=here if has_target else None)
    assert found.leaves["params/divided"] == 4
    assert found.leaves["params/free"] == 8


def test_the_memory_is_that_of_the_targets_chip() -> None:
    here = ft.target()
    small = dataclasses.replace(here, chip=here.chip._replace(name="small", memory_bytes=10))
    found = ft.inspect.memory(jnp.zeros(2), step, BATCH, target=small)
    assert (found.fits, found.chip) == (False, small.chip)
    assert "It does not fit: " in str(found)
    assert "more than 10 B (small)." in str(found)
    assert repr(found).endswith("does not fit)")
    assert ft.inspect.memory(jnp.zeros(2), step, BATCH, target=here).fits
    assert ft.inspect.memory(jnp.zeros(2), step, BATCH).fits is None


def test_a_mesh_of_other_devices_than_the_target_is_refused(first_device: ft.Target) -> None:
    mesh = ft.target().mesh({"data": -1})
    divided = jax.device_put(jnp.zeros(2), NamedSharding(mesh, P("data")))
    for state, sharding in ((jnp.zeros(2), mesh), (divided, None)):
        with pytest.raises(
            ValueError, match=r"sharding: expected a mesh of the devices of .*mesh\("
        ):
            ft.inspect.memory(state, step, BATCH, target=first_device, sharding=sharding)
