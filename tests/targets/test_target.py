"""Targets by name, and names that are no targets. Most of it needs no compiler."""

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import functrain as ft
from functrain.targets import _chips
from functrain.targets._chips import accelerator_of, chip_of, device_of
from functrain.targets._compilers import GPUS, _target_config, known_targets

H100 = _target_config(GPUS["h100"])
OWN_CARD = H100.replace("NVIDIA H100 80GB HBM3", "NVIDIA L4").replace(
    "84942979072", str(24 * 2**30)
)


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["tpu:v9", "tpu", "tpu:", "tpu:v5e-64", "cuda:v5e", "cuda:", "vax", "", "TPU:v5e"]
)
def test_an_unknown_name_lists_those_that_are_known(name: str) -> None:
    with pytest.raises(ValueError, match=r"^name: expected ") as raised:
        ft.target(name)
    message = str(raised.value)
    assert known_targets() in message
    assert message.count(f"got '{name.removesuffix(':')}'") == 1


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("tpu:v5e:2x2", "libtpu", "tpu"), ("cuda:h100", "jax_plugins.xla_cuda12", "cuda")],
)
def test_a_missing_compiler_is_named_with_its_pip_line(
    name: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"not installed: pip install 'functrain\[{extra}\]'"):
        ft.target(name)


def test_a_compiler_of_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(**options: str) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: unexpected version of the interface")

    monkeypatch.setitem(sys.modules, "libtpu", types.ModuleType("libtpu"))
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="unexpected version") as raised:
        ft.target("tpu:v5e:8x16")
    assert f"jax=={jax.__version__}" in raised.value.__notes__[0]


def test_a_configuration_without_a_field_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="a target configuration with device_memory_size, got"):
        ft.target(H100.replace("device_memory_size", "other"))


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["3x3", "abc", "2x2x2"])
def test_a_topology_that_does_not_exist_is_refused_with_those_that_do(topology: str) -> None:
    expected = rf"expected a topology of v5e \(2x2, .* 16x16\).*, got 'tpu:v5e:{topology}'"
    with pytest.raises(ValueError, match=expected):
        ft.target(f"tpu:v5e:{topology}")


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "count", "chip", "gib"),
    [
        ("tpu:v5e", 1, "TPU v5e", 15.75),
        ("tpu:v5e:4x4", 16, "TPU v5e", 15.75),
        ("tpu:v5p:2x2x1", 4, "TPU v5p", 95.74),
        ("tpu:v6e:2x2", 4, "TPU v6e", 31.25),
    ],
)
def test_a_slice_has_its_chips_and_their_memory(
    name: str, count: int, chip: str, gib: float
) -> None:
    found = ft.target(name)
    assert (found.platform, len(found.devices), found.chip.name) == ("tpu", count, chip)
    assert found.chip.memory_bytes == int(gib * 2**30)


@pytest.mark.cuda
@pytest.mark.parametrize("name", sorted(GPUS))
def test_a_gpu_has_the_figures_of_its_configuration(name: str) -> None:
    found = ft.target(f"cuda:{name}")
    assert (found.platform, len(found.devices)) == ("gpu", 1)
    assert found.chip == chip_of(device(GPUS[name].description, None))


@pytest.mark.cuda
def test_the_configuration_of_a_card_is_a_target() -> None:
    found = ft.target(OWN_CARD)
    assert (found.name, found.platform) == ("NVIDIA L4", "gpu")
    assert (found.chip.memory_bytes, found.chip.clock_hz) == (24 * 2**30, 1.98e9)
    program = jax.jit(jnp.sum).lower(found.shapes(np.ones((8, 8), np.float32))).compile()
    assert "fusion" in program.as_text()
    with pytest.raises(jax.errors.JaxRuntimeError):
        ft.target(H100.replace("}", "", 1))


# --- this machine --------------------------------------------------------------------------------


def test_without_a_name_the_target_is_this_machine() -> None:
    here = ft.target()
    assert here.devices == tuple(jax.devices())
    assert here.platform == jax.default_backend()
    assert repr(here).startswith("Target('cpu': 2 × cpu, ")


def test_arrays_of_this_machine_can_be_moved_and_those_put_somewhere_stay() -> None:
    here = ft.target()
    first, second = here.devices
    tree = {"free": jnp.ones(3), "put": jax.device_put(jnp.ones(2), second), "host": np.ones(4)}
    shapes = here.shapes(tree, SingleDeviceSharding(first))
    assert {name: list(x.sharding.device_set) for name, x in shapes.items()} == {
        "free": [first],
        "put": [second],
        "host": [first],
    }
    assert jax.tree.map(np.shape, tree) == {name: x.shape for name, x in shapes.items()}


def test_shapes_take_a_sharding_for_each_leaf() -> None:
    here = ft.target()
    mesh = here.mesh({"data": -1})
    placed = {"w": NamedSharding(mesh, P("data")), "b": NamedSharding(mesh, P())}
    shapes = here.shapes({"w": np.ones((4, 2)), "b": np.ones(2)}, placed)
    assert {name: x.sharding for name, x in shapes.items()} == placed
    assert here.shapes(shapes) == shapes, "what is placed on the target keeps its place"


# --- memory --------------------------------------------------------------------------------------


def device(kind: str, memory: int | None) -> Any:
    """Returns a device that reports its memory, or that of another process, which does not."""

    def memory_stats() -> dict[str, int]:
        if memory is None:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: only for addressable devices")
        return {"bytes_limit": memory}

    return types.SimpleNamespace(device_kind=kind, memory_stats=memory_stats)


def test_the_memory_of_a_known_chip_is_the_part_of_it_that_jax_takes() -> None:
    known = chip_of(device("NVIDIA H200", None))
    assert chip_of(device("NVIDIA H200", 3 * 2**30)) == known._replace(memory_bytes=3 * 2**30)
    assert chip_of(device("NVIDIA H200", 2**50)) == known


def test_k_is_chosen_for_the_whole_memory_of_a_known_chip_as_its_compiler_does(monkeypatch) -> None:
    present = device("NVIDIA H200", 3 * 2**30)
    monkeypatch.setattr(_chips, "platform_of", lambda tree: "gpu")
    monkeypatch.setattr(_chips, "device_of", lambda tree: present)
    assert accelerator_of(()) == chip_of(device("NVIDIA H200", None))


def test_the_memory_of_a_mesh_is_that_of_a_device_of_this_process() -> None:
    here, elsewhere = device("new", 3 * 2**30), device("new", None)
    mesh = types.SimpleNamespace(device_set=[elsewhere, here], addressable_devices=[here])
    assert device_of([types.SimpleNamespace(sharding=mesh)]) is here
    everywhere_else = types.SimpleNamespace(device_set=[elsewhere], addressable_devices=[])
    assert device_of([types.SimpleNamespace(sharding=everywhere_else)]) is elsewhere
