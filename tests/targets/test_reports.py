"""Reports for a TPU or a GPU that is not there: what fits, what it costs, and its program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import keras
import optax
import pytest

import bridge
import functrain as ft
from tests.workload_parts import parts

TX = optax.sgd(0.1)
GIB = 2**30


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def add_mean(state: Any, batch: Any) -> Any:
    return jax.tree.map(lambda x: x + jnp.mean(batch), state), {}


def loss_fn(params: Any, model_state: Any, x: Any, *, rng: Any, training: bool) -> Any:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2), ft.Aux(model_state)


def wide() -> Any:
    """Returns the shapes of a state whose hidden layer has 32768 units."""

    def create() -> ft.TrainState:
        params = {"a": jnp.ones((128, 2**15)), "b": jnp.ones((2**15, 128))}
        return ft.TrainState.create(params=params, tx=TX)

    return jax.eval_shape(create)


@pytest.fixture(scope="module")
def v5e() -> ft.Target:
    return ft.target("tpu:v5e")


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.tpu
def test_a_state_beyond_the_memory_is_reported_in_words_with_advice(v5e: ft.Target) -> None:
    report = ft.inspect.memory(
        {"w": f32(10 * 2**15, 2**15)}, add_mean, f32(8, 8), target=v5e, fuse=2
    )
    assert report.fits is False
    assert (report.state, report.original_state) == (40 * GIB, 40 * GIB)
    verdict, *advice = str(report).splitlines()[-3:]
    assert verdict == "It does not fit: 64.3 GiB more than 15.8 GiB (TPU v5e)."
    assert advice == [
        "- 40.0 GiB of state: divide it over the chips of a slice, with ft.sharding.fsdp.",
        "- 40.0 GiB of your original state: fit(donate=True) takes it over.",
    ]


@pytest.mark.tpu
def test_temporaries_beyond_the_memory_are_counted_and_named(v5e: ft.Target) -> None:
    arguments = wide(), ft.train_step(loss_fn, TX), f32(2**17, 128)
    report = ft.inspect.memory(*arguments, target=v5e, fuse=2)
    assert report.fits is False
    # The activations of the hidden layer.
    assert 16 * GIB <= report.temporaries < 17 * GIB
    assert "GiB of temporaries: a smaller batch, ft.micro_batches, or ft.remat." in str(report)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        ft.inspect.cost(*arguments, target=v5e, fuse=2)


@pytest.mark.tpu
def test_a_state_that_is_divided_counts_its_part_on_each_chip() -> None:
    target = ft.target("tpu:v5e:2x2")
    mesh = target.mesh({"data": -1})
    shapes = {"w": f32(2, 2**30)}
    state = target.shapes(shapes, ft.sharding.shardings(shapes, mesh, ft.sharding.fsdp()))
    report = ft.inspect.memory(state, add_mean, f32(8, 8), target=target, sharding=mesh, fuse=2)
    assert report.state == 2 * GIB
    assert report.fits


@pytest.mark.tpu
@pytest.mark.long
def test_the_largest_batch_fits_and_a_larger_one_does_not(v5e: ft.Target) -> None:
    step = ft.train_step(loss_fn, TX)

    def fits(examples: int) -> bool | None:
        return ft.inspect.memory(wide(), step, f32(examples, 128), target=v5e, fuse=2).fits

    examples = ft.inspect.largest_batch(
        wide(), step, f32(1024, 128), target=v5e, fuse=2, multiple_of=1024
    )
    # 15.75 GiB of activations of 128 KiB an example, less the state and the chunks.
    assert 100_000 < examples < 2**17
    assert fits(examples)
    assert not fits(examples + max(1024, examples // 16))


@pytest.mark.tpu
def test_one_device_of_a_slice_without_a_mesh_is_warned_about() -> None:
    target, arguments = ft.target("tpu:v5e:2x2"), ({"w": f32(8)}, add_mean, f32(8, 8))
    with pytest.warns(UserWarning, match=r"has 4 devices.* Pass sharding=target.mesh\("):
        ft.inspect.memory(*arguments, target=target, fuse=2)
    # A warning would be an error.
    mesh = target.mesh({"data": -1})
    ft.inspect.memory(*arguments, target=target, fuse=2, sharding=mesh)


# --- cost ----------------------------------------------------------------------------------------


@pytest.mark.tpu
def test_the_time_on_a_tpu_is_that_of_its_compilers_cycles(v5e: ft.Target) -> None:
    state, step, batch = parts("digits-mlp")
    report = ft.inspect.cost(state, step, batch, target=v5e, fuse=32)
    assert report.basis == "the TPU compiler's cycles"
    assert report.seconds == pytest.approx(sum(layer.seconds for layer in report.layers))
    assert report.kernels == pytest.approx(sum(layer.kernels for layer in report.layers))
    # libtpu 0.0.41: 16,209 cycles and 12 kernels; 25,323 and 17 without rewrites.
    assert 10_000 < report.seconds * v5e.chip.clock_hz < 20_000
    assert 10 < report.kernels < 25
    assert report.dispatch_saved > 0.5
    assert max(map(len, str(report).splitlines())) <= 80
    names = {layer.name for layer in report.layers}
    assert "loss" in names
    faster = dataclasses.replace(v5e, chip=v5e.chip._replace(clock_hz=2 * v5e.chip.clock_hz))
    half = ft.inspect.cost(state, step, batch, target=faster, fuse=32)
    assert half.seconds == pytest.approx(report.seconds / 2)


@pytest.mark.tpu
def test_gathers_of_divided_kernels_are_counted_for_a_step() -> None:
    target = ft.target("tpu:v5e:2x2")
    mesh = target.mesh({"data": -1})

    def create() -> ft.TrainState:
        params = {"a": jnp.ones((256, 1024)), "b": jnp.ones((1024, 256))}
        return ft.TrainState.create(params=params, tx=TX)

    shapes = jax.eval_shape(create)
    state = target.shapes(shapes, ft.sharding.shardings(shapes, mesh, ft.sharding.fsdp()))
    report = ft.inspect.cost(
        state, ft.train_step(loss_fn, TX), f32(2048, 256), target=target, sharding=mesh, fuse=4
    )
    size = 2 * 256 * 1024
    assert report.traffic["all-gather"].bytes == 2 * size
    assert report.traffic["reduce-scatter"].bytes == 4 * size // 4
    assert report.devices == 4
    assert report.flops == 5 * 2 * 2048 * 256 * 1024


@pytest.mark.cuda
def test_the_time_on_a_gpu_is_a_roofline() -> None:
    target = ft.target("cuda:h100")
    state, step, batch = parts("digits-mlp")
    report = ft.inspect.cost(state, step, batch, target=target, fuse=8)
    assert report.basis == "a roofline, and 2 µs for each kernel"
    assert 2e-6 * report.kernels < report.seconds < 3e-6 * report.kernels
    assert 10 < report.kernels < 40
    assert max(map(len, str(report).splitlines())) <= 80


@pytest.mark.tpu
def test_a_keras_model_has_its_layers_and_variables_in_the_reports(v5e: ft.Target) -> None:
    layers = [keras.Input((64,)), keras.layers.Dense(32, name="hidden"), keras.layers.Dense(10)]
    model = keras.Sequential(layers, name="small")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batch = f32(32, 64), jax.ShapeDtypeStruct((32,), jnp.int32)
    cost = bridge.cost(model, batch, target=v5e, fuse=8)
    assert any("hidden" in layer.name for layer in cost.layers)
    memory = bridge.memory(model, batch, target=v5e, fuse=8)
    assert memory.fits
    assert any("hidden/kernel" in path for path in memory.leaves)
