"""Devices that are not there, from compilers that run without them."""

import functools
import os
import re
from typing import NamedTuple

import jax

from functrain.common._checks import require
from functrain.common._library import import_optional
from functrain.targets._chips import Chip, known_chip

# The topologies of the slices of each generation, from the smallest that libtpu knows.
_FLAT = "2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
TPUS = {"v5e": _FLAT, "v5p": "2x2x1 to 16x16x24", "v6e": _FLAT}


class Gpu(NamedTuple):
    """The figures of an NVIDIA GPU that its compiler asks for, beside those of its `Chip`.

    Those of https://github.com/openxla/xla, xla/backends/gpu/target_config/specs.
    """

    description: str
    capability: int
    cores: int
    units_per_core: int
    l2_cache: int
    shared_per_core: int
    shared_per_block: int


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 41_943_040, 167_936, 166_912),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 52_428_800, 233_472, 232_448),
    "h200": Gpu("NVIDIA H200 141GB HBM3e", 9, 132, 128, 52_428_800, 233_472, 232_448),
    "b200": Gpu("NVIDIA B200", 10, 148, 128, 132_644_864, 233_472, 232_448),
}

# Read by the compilers when they are loaded. Without TPU_SKIP_MDS_QUERY, libtpu asks the cloud's
# metadata server for minutes on any other machine; without ALLOW_MULTIPLE_LIBTPU_LOAD, only one
# process of a machine may load it. With the others, compilers do not report a missing device.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def known_targets() -> str:
    """Returns the names of the targets without topologies, for messages."""
    names = [*(f"tpu:{name}" for name in TPUS), *(f"cuda:{name}" for name in GPUS)]
    return ", ".join(map(repr, names))


def tpu_devices(name: str) -> tuple[jax.Device, ...]:
    """Returns the devices of a TPU slice.

    Args:
      name: The generation and the topology, such as ``v5e:4x4``; without the topology, one chip.
    """
    generation, _, topology = name.partition(":")
    advice = "A slice is named by its topology: 'tpu:v5e:8x8' has 64 chips."
    got = f"tpu:{name}".removesuffix(":")
    require(generation in TPUS, "name", known_targets(), got, advice)
    sizes = TPUS[generation]
    smallest = re.split(", | to ", sizes)[0]
    _load_compiler("libtpu", "tpu")
    expected = f"a topology of {generation} ({sizes}), or none for one chip"
    # libtpu also accepts topologies that no slice has: with more axes, or larger ones.
    is_slice = topology.count("x") == 2 if generation == "v5p" else topology in sizes.split(", ")
    require(not topology or is_slice, "name", expected, f"tpu:{name}")
    devices = _describe("tpu", f"{generation}:{topology or smallest}")
    return devices if topology else devices[:1]


def cuda_devices(name: str) -> tuple[tuple[jax.Device, ...], Chip]:
    """Returns the device of a GPU, as a tuple of one, and its figures.

    Args:
      name: The name of the GPU, such as ``h100``, or the text of its target configuration.
    """
    if "gpu_device_info" in name:
        config = name
    else:
        require(name in GPUS, "name", known_targets(), f"cuda:{name}".removesuffix(":"))
        config = _target_config(GPUS[name])
    chip = _chip_of(config)
    _load_compiler("jax_plugins.xla_cuda12", "cuda")
    return _describe("cuda", "1x1x1", topology="1x1x1", target_config=config), chip


def _load_compiler(module: str, extra: str) -> None:
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    import_optional(module, f"{module} is not installed: pip install 'functrain[{extra}]'")


# Devices that are described twice are not equal, so a mesh of the one would not suit the other.
@functools.cache
def _describe(platform: str, name: str, **options: str) -> tuple[jax.Device, ...]:
    # Imported here, since few programs need it.
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(platform=platform, topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        error.add_note(
            "functrain.target asked a compiler for a device. Its version must fit that of jax: "
            f"jax=={jax.__version__}. It refuses the fields of a newer version's target "
            "configuration: remove them."
        )
        raise
    return tuple(described.devices)


def _target_config(gpu: Gpu) -> str:
    """Returns a target configuration, in the text form of XLA's GpuTargetConfigProto."""
    chip = known_chip(gpu.description)
    assert chip is not None
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_per_block}
  shared_memory_per_core: {gpu.shared_per_core} l2_cache_size: {gpu.l2_cache}
  core_count: {gpu.cores} fpus_per_core: {gpu.units_per_core} clock_rate_ghz: {chip.clock_hz / 1e9}
  memory_bandwidth: {int(chip.bandwidth)} device_memory_size: {chip.memory_bytes}
  cuda_compute_capability {{ major: {gpu.capability} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{gpu.description}"
"""


def _chip_of(config: str) -> Chip:
    """Returns the chip of a target configuration: one that is known, or its own figures."""
    name = _field(config, r'device_description_str: *"([^"]*)"')
    memory = int(_field(config, r"device_memory_size: *(\d+)"))
    bandwidth = float(_field(config, r"memory_bandwidth: *([\d.e+]+)"))
    clock = float(_field(config, r"clock_rate_ghz: *([\d.e+]+)"))
    described = Chip(name, memory, bandwidth, 0.0, clock * 1e9, "its target configuration")
    return known_chip(name) or described


def _field(config: str, pattern: str) -> str:
    texts: list[str] = re.findall(pattern, config)
    expected = f"a target configuration with {pattern.partition(':')[0]}"
    require(texts, "name", expected, config[:80])
    return texts[0]
