"""The program that reports are about: its devices, and compilers that find it too large."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import functrain as ft
from functrain.inspect._fit_program import FitProgram, TooLargeError, compile_program, lower_fit

BATCH = np.ones((8, 4), np.float32)
MESSAGE = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in hbm.
Used 16.38G of 15.75G hbm. Exceeded hbm capacity by 647.00M.

Total hbm usage >= 16.38G:
    reserved        258.00M
    program          16.12G
    arguments       ARGUMENTS

  Largest program allocations in hbm:

  1. Size: 16.00G
     Operator: op_name="jit(run)/while/body/closed_call/jvp(mlp)/dense/dot_general"
     Shape: f32[131072,32768]{1,0:T(8,128)}

  2. Size: 512B
     Operator: op_name="jit(run)/while/body/add"
     Shape: s32[]{:T(128)}
"""


def step(state: Any, batch: Any) -> Any:
    return state + jnp.mean(batch), {}


def refused(message: str) -> FitProgram:
    """Returns a program whose compiler raises an error."""

    class Lowered:
        def compile(self) -> None:
            raise jax.errors.JaxRuntimeError(message)

    return FitProgram(1, (), (), Lowered(), ft.target().chip)


def test_a_program_that_is_too_large_is_reported_in_words_without_the_compilers_trace() -> None:
    with pytest.raises(TooLargeError) as raised:
        compile_program(refused(MESSAGE.replace("ARGUMENTS", "1.50G")))
    assert str(raised.value).splitlines() == [
        "The program is too large for the device: 16.1 GiB of temporaries and 1.5 GiB of arguments "
        "do not fit into 15.8 GiB. The largest temporaries:",
        "  16.0 GiB in jit(run)/while/body/closed_call/jvp(mlp)/dense/dot_general",
    ]
    assert raised.value.__cause__ is raised.value.__context__ is None
    assert isinstance(raised.value, MemoryError)
    assert "functrain.inspect.memory" in raised.value.__notes__[0]
    assert raised.value.capacity == int(15.75 * 2**30)


def test_arguments_that_the_compiler_did_not_count_are_not_named() -> None:
    message = str(TooLargeError(MESSAGE.replace("ARGUMENTS", "0B")))
    assert "16.1 GiB of temporaries do not fit into 15.8 GiB" in message


def test_a_buffer_that_exceeds_the_memory_by_itself_is_named() -> None:
    message = (
        "RESOURCE_EXHAUSTED: Allocation (size=42949672960) would exceed memory (size=17179869184) "
        ":: %s0 = inlined_call_operand.hbm [shape: f32[327680,32768], index: 0, kind: input]"
    )
    assert str(TooLargeError(message)) == (
        "The program is too large for the device: one buffer, f32[327680,32768], takes 40.0 GiB of "
        "16.0 GiB."
    )


def test_other_errors_of_the_compiler_are_raised_as_they_are() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: another one"):
        compile_program(refused("INTERNAL: another one"))


def test_what_is_no_target_is_refused() -> None:
    message = r"target: expected a target .*, got 'tpu:v5e'. Pass functrain.target\('tpu:v5e'\)\."
    for report in (ft.inspect.memory, ft.inspect.cost, ft.inspect.largest_batch):
        with pytest.raises(TypeError, match=message):
            report(jnp.zeros(2), step, BATCH, target="tpu:v5e")  # type: ignore[operator]


@pytest.fixture
def first_device() -> ft.Target:
    here = ft.target()
    return dataclasses.replace(here, name="first", devices=here.devices[:1])


def test_a_state_on_other_devices_than_the_target_is_refused(first_device: ft.Target) -> None:
    mesh = ft.target().mesh({"data": -1})
    divided = jax.device_put(jnp.zeros(2), NamedSharding(mesh, P("data")))
    other = ft.target().shapes(jnp.zeros(2), SingleDeviceSharding(jax.devices()[1]))
    for state in (divided, other):
        expected = r"state: expected leaves on the devices of Target\('first'.* The leaf is at w\."
        with pytest.raises(ValueError, match=expected):
            ft.inspect.memory({"w": state}, lambda s, b: (s, {}), BATCH, target=first_device)


def test_an_array_on_one_other_device_is_taken_as_one_on_the_target(
    first_device: ft.Target,
) -> None:
    state = jax.device_put(jnp.zeros(2), jax.devices()[1])
    assert ft.inspect.memory(state, step, BATCH, target=first_device).state == 8


def test_an_array_that_was_put_on_a_device_stays_there_without_a_target() -> None:
    second = jax.devices()[1]
    state = {"put": jax.device_put(jnp.zeros(2), second), "free": jnp.zeros(2)}
    program = lower_fit("test", state, lambda state, batch: (state, {}), BATCH)
    assert program.carry["put"].sharding.device_set == {second}
    assert program.carry["free"].sharding is None
    carried = compile_program(program).input_shardings[0][0]
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


def test_a_mesh_of_other_devices_than_the_target_is_refused(first_device: ft.Target) -> None:
    mesh = ft.target().mesh({"data": -1})
    with pytest.raises(ValueError, match=r"sharding: expected a mesh of the devices of .*mesh\("):
        ft.inspect.memory(jnp.zeros(2), step, BATCH, target=first_device, sharding=mesh)


def test_a_state_on_one_device_does_not_go_with_batches_on_a_mesh() -> None:
    here = ft.target()
    state, mesh = here.shapes(jnp.zeros(2)), here.mesh({"data": -1})
    with pytest.raises(ValueError, match=r"state: expected leaves on the mesh of the batches"):
        ft.inspect.memory({"w": state}, lambda s, b: (s, {}), BATCH, target=here, sharding=mesh)


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
