"""The estimated cost of a step: operations counted by hand, layers by name, tables that fit."""

import dataclasses
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import functrain as ft
from functrain.inspect._cost import (
    DISPATCH_SECONDS,
    KERNEL_SECONDS,
    Cost,
    Layer,
    layer_name,
    product_flops,
    trace_step,
)
from functrain.inspect._fit_program import lower_fit
from functrain.sharding import Traffic
from functrain.targets import Chip

CHIP = Chip("TPU v9", 2**30, 1e9, 1e12, 1e9, "made up")
BODY = "jit(run)/while/body/closed_call"


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def flops(step: Any, state: Any, batch: Any) -> int:
    return product_flops(trace_step(step, state, batch))


# --- operations ----------------------------------------------------------------------------------


def test_products_of_an_mlp_are_those_counted_by_hand() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"])

    def step(params: Any, x: Any) -> Any:
        gradients = jax.grad(loss)(params, x)
        return jax.tree.map(jnp.subtract, params, gradients), {}

    rows, inputs, hidden, outputs = 8, 16, 32, 4
    params = {"a": f32(inputs, hidden), "b": f32(hidden, outputs)}
    first, second = 2 * rows * inputs * hidden, 2 * rows * hidden * outputs
    # Forward; the gradients of both kernels; and that of the hidden layer, not that of the inputs.
    assert flops(step, params, f32(rows, inputs)) == 2 * first + 3 * second


@pytest.mark.parametrize(("is_remat", "products"), [(False, 3), (True, 4)])
def test_layers_in_a_scan_count_each_and_once_more_if_they_are_computed_again(
    is_remat: bool, products: int
) -> None:
    rows, width, depth = 8, 16, 5

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w), None

    def loss(kernels: Any, x: Any) -> Any:
        body = jax.checkpoint(layer) if is_remat else layer
        return jnp.sum(jax.lax.scan(body, x, kernels)[0])

    def step(kernels: Any, x: Any) -> Any:
        return kernels - jax.grad(loss)(kernels, x), {}

    found = flops(step, f32(depth, width, width), f32(rows, width))
    assert found == products * depth * 2 * rows * width**2


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_its_kernel_for_every_output(groups: int) -> None:
    def step(kernel: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(2, 2),
            padding="VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return kernel + jnp.mean(y), {}

    images, outputs = f32(8, 9, 9, 4), 8 * 4 * 4 * 6
    assert flops(step, f32(3, 3, 4 // groups, 6), images) == 2 * outputs * 3 * 3 * 4 // groups


def test_attention_of_cudnn_counts_as_that_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU with cuDNN. Nothing is compiled.
    cudnn = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{cudnn}.check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(f"{cudnn}.check_compute_capability", lambda capability: True)

    def with_attention(implementation: Any) -> int:
        def loss(q: Any, kv: Any) -> Any:
            options = {"is_causal": True, "implementation": implementation}
            return jnp.sum(jax.nn.dot_product_attention(q, kv, kv * 2, **options))

        def step(q: Any, kv: Any) -> Any:
            return jax.grad(loss, argnums=(0, 1))(q, kv), {}

        shapes = (jax.ShapeDtypeStruct((2, length, 3, 64), jnp.bfloat16) for length in (128, 256))
        return flops(step, *shapes)

    # Scores and their sums over the values, forward; and two gradients for each.
    assert with_attention("cudnn") == with_attention("xla") == 6 * 2 * (2 * 3 * 128 * 256 * 64)


# --- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op_name", "layer"),
    [
        (f"{BODY}/transpose(jvp(mlp))/dense/dot_general", "mlp/dense"),
        (f"{BODY}/jvp(mlp)/dense/jit(relu)/max", "mlp/dense"),
        (f"{BODY}/transpose(jvp(vmap(mlp)))/dense/add", "mlp/dense"),
        (f"{BODY}/jvp(checkpoint(mlp))/rematted_computation/dense/dot_general", "mlp/dense"),
        (f"{BODY}/jvp(mlp)/while/body/attention/dot_general", "mlp/attention"),
        (f"{BODY}/cond/branch_0_fun/dense/add", "dense"),
        (f"{BODY}/jvp()/reduce_sum", "loss"),
        (f"{BODY}/jvp(jit(loss))/mul", "loss"),
        (f"{BODY}/optimizer/add", "optimizer"),
        (f"{BODY}/add", "other"),
        ("jit(<lambda>)/while/cond/lt", "other"),
        ("add", "other"),
        ("", "other"),
    ],
)
def test_an_operation_belongs_to_the_scope_that_it_was_traced_in(op_name: str, layer: str) -> None:
    assert layer_name(op_name) == layer


# --- the report ----------------------------------------------------------------------------------


def report(**changes: Any) -> Cost:
    layers = (Layer("mlp/dense", 3e-6, 2.0), Layer("optimizer", 1e-6, 5.0))
    made = Cost(8, CHIP, 25e-6, "cycles", 7.0, 10**6, 1, layers, {})
    return dataclasses.replace(made, **changes)


def test_dispatch_saved_is_that_of_one_program_for_k_steps() -> None:
    for k, seconds in (1, 25e-6), (8, 25e-6), (128, 1e-3):
        single, fused = seconds + DISPATCH_SECONDS, seconds + DISPATCH_SECONDS / k
        found = report(k=k, seconds=seconds).dispatch_saved
        assert found == pytest.approx(1 - fused / single, abs=1e-12)


def test_the_part_of_the_peak_is_that_of_all_devices() -> None:
    assert report(flops=10**6, seconds=1e-5).utilization == pytest.approx(0.1)
    assert report(flops=10**6, seconds=1e-5, devices=4).utilization == pytest.approx(0.025)
    assert math.isnan(report(chip=CHIP._replace(peak_flops=0.0)).utilization)


LONG_NAME = "/".join(["a_module_with_a_long_name"] * 8)


@pytest.mark.parametrize(
    "found",
    [
        report(layers=()),
        report(
            layers=tuple(Layer(f"{LONG_NAME}/{i}", 1e-6 * i, 1e5) for i in range(40)),
            chip=CHIP._replace(name="a long name " * 8),
            traffic={"collective-permute": Traffic(10**6, 10**13), "all-gather": Traffic(8, 800)},
        ),
        report(flops=10**18, k=128, devices=4096, seconds=123.0),
    ],
)
def test_the_tables_are_at_most_80_columns_wide(found: Cost) -> None:
    assert max(map(len, str(found).splitlines())) <= 80


def test_operations_are_those_of_all_devices_and_each_holds_its_part() -> None:
    here = ft.target()
    mesh = here.mesh({"data": -1})

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), {}

    def cost(**places: Any) -> Cost:
        return ft.inspect.cost(f32(64, 64), step, f32(32, 64), fuse=4, target=here, **places)

    alone, divided = cost(), cost(sharding=mesh)
    assert (alone.devices, divided.devices) == (1, 2)
    assert alone.flops == divided.flops == 2 * 2 * 32 * 64 * 64
    assert alone.traffic == {}
    # The gradients of a step are summed over the devices, four times in a program.
    assert divided.traffic["all-reduce"].bytes >= 64 * 64 * 4


def test_the_roofline_is_that_of_the_targets_chip() -> None:
    here = ft.target()

    def cost(**figures: float) -> Cost:
        target = dataclasses.replace(here, chip=CHIP._replace(**figures))

        def step(w: Any, x: Any) -> Any:
            return w + jnp.mean(x @ x), {}

        return ft.inspect.cost(f32(), step, f32(64, 64), fuse=4, target=target)

    slow = cost(peak_flops=1e6, bandwidth=1e30)
    expected = 2 * 64**3 / 1e6 + slow.kernels * KERNEL_SECONDS
    assert slow.seconds == pytest.approx(expected)
    assert "roofline" in slow.basis
    assert slow.utilization == pytest.approx(1.0, rel=1e-2)
    assert cost(peak_flops=1e6, bandwidth=1.0).seconds > 10 * slow.seconds
    unknown = cost(peak_flops=0.0)
    assert math.isnan(unknown.seconds)
    assert unknown.basis == "nothing: the speed of the device is unknown"
    assert "nan" not in str(unknown)
    assert repr(unknown).startswith("Cost(unknown a step on ")


def test_cycles_of_a_chip_without_a_clock_are_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = '  ROOT %copy.1 = f32[8]{0} copy(%x), backend_config={"estimated_cycles":"99"}'
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{copy}\n}}\n"
    made = types.SimpleNamespace(compile=lambda: types.SimpleNamespace(as_text=lambda: text))

    def lower(*args: Any, **options: Any) -> Any:
        return lower_fit(*args, **options)._replace(lowered=made)

    monkeypatch.setattr("functrain.inspect._cost.lower_fit", lower)

    def cost(**figures: float) -> Cost:
        target = dataclasses.replace(ft.target(), chip=CHIP._replace(**figures))
        return ft.inspect.cost(f32(), lambda x, y: (x, {}), f32(8), fuse=1, target=target)

    assert cost().seconds == pytest.approx(99e-9)
    assert cost(clock_hz=0.0).basis == "a roofline, and 2 µs for each kernel"
    assert math.isnan(cost(clock_hz=0.0, peak_flops=0.0).seconds)


def test_kernels_of_a_loop_of_unknown_length_do_not_depend_on_k() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state + jnp.mean(batch @ batch.T), {}

    counts = [ft.inspect.cost(f32(), step, f32(32, 64), fuse=k).kernels for k in (2, 8, 32)]
    assert counts == [counts[0]] * 3
    assert counts[0] >= 1
