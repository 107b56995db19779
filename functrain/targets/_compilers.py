"""Devices that are not there, from compilers that run without them."""

import contextlib
import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

import jax

from functrain.common._checks import require
from functrain.common._library import import_optional
from functrain.targets._chips import Chip, known_chip

# The topologies of the slices of each generation, from the smallest that libtpu knows.
_FLAT = "2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"
TPUS = {"v5e": _FLAT, "v5p": "2x2x1 to 16x16x24", "v6e": _FLAT}


class Gpu(NamedTuple):
    """The figures of an NVIDIA GPU that its compiler asks for.

    Those of https://github.com/openxla/xla, xla/backends/gpu/target_config/specs.
    """

    description: str
    capability: int
    cores: int
    units_per_core: int
    clock_ghz: float
    memory: int
    bandwidth: int
    l2_cache: int
    shared_per_core: int
    shared_per_block: int


GPUS = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB",
        *(8, 108, 64, 1.41),
        *(85_100_068_864, 2_039_040_000_000, 41_943_040, 167_936, 166_912),
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3",
        *(9, 132, 128, 1.98),
        *(84_942_979_072, 3_352_320_000_000, 52_428_800, 233_472, 232_448),
    ),
    "h200": Gpu(
        "NVIDIA H200 141GB HBM3e",
        *(9, 132, 128, 1.98),
        *(151_397_597_184, 4_800_000_000_000, 52_428_800, 233_472, 232_448),
    ),
    "b200": Gpu(
        "NVIDIA B200",
        *(10, 148, 128, 1.965),
        *(191_514_411_008, 7_672_320_000_000, 132_644_864, 233_472, 232_448),
    ),
}


# Without the first one, libtpu asks the cloud's metadata server for minutes on any other machine.
# Without the second, only one process of a machine may load libtpu, as if it used the TPU.
_WITHOUT_TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def known_targets() -> list[str]:
    """Returns the names of the targets that need no other text."""
    return [*(f"tpu:{name}" for name in TPUS), *(f"cuda:{name}" for name in GPUS)]


def tpu_devices(name: str) -> tuple[jax.Device, ...]:
    """Returns the devices of a TPU slice.

    Args:
      name: The generation and the topology, such as ``v5e:4x4``; without the topology, one chip.
    """
    generation, _, topology = name.partition(":")
    names = ", ".join(map(repr, known_targets()))
    advice = "A slice is named by its topology: 'tpu:v5e:8x8' has 64 chips."
    require(generation in TPUS, "name", names, f"tpu:{name}" if name else "tpu", advice)
    sizes = TPUS[generation]
    smallest = re.split(", | to ", sizes)[0]
    advice = f"pip install 'jax[tpu]=={jax.__version__}', or 'functrain[tpu]'"
    import_optional("libtpu", f"The compiler for TPUs is not installed: {advice}")
    for variable, value in _WITHOUT_TPU.items():
        os.environ.setdefault(variable, value)
    expected = f"a topology of {generation} ({sizes}), or none for one chip"
    # libtpu also accepts topologies that no slice has: with more axes, or larger ones.
    is_slice = topology.count("x") == 2 if generation == "v5p" else topology in sizes.split(", ")
    require(not topology or is_slice, "name", expected, f"tpu:{name}")
    with _explained(f"tpu:{name}", expected, advice):
        devices = _describe("tpu", f"{generation}:{topology or smallest}")
    return devices if topology else devices[:1]


def cuda_devices(name: str) -> tuple[tuple[jax.Device, ...], Chip]:
    """Returns a GPU, given its name or the text of its target configuration."""
    if "gpu_device_info" in name:
        config = name
    else:
        names = ", ".join(map(repr, known_targets()))
        require(name in GPUS, "name", names, f"cuda:{name}" if name else "cuda")
        config = _target_config(GPUS[name])
    chip = _chip_of_config(config)
    advice = f"pip install 'jax[cuda12]=={jax.__version__}', or 'functrain[cuda]'"
    with quiet_compiler():
        import_optional(
            "jax_plugins.xla_cuda12", f"The compiler for NVIDIA GPUs is not installed: {advice}"
        )
    # jax would look for a driver and for libraries that only running programs need.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    expected = "the name of a GPU, or its target configuration in the text form of XLA"
    with _explained(config[:80], expected, advice):
        devices = _describe("cuda", "1x1x1", topology="1x1x1", target_config=config)
    return devices, chip


@contextlib.contextmanager
def _explained(name: str, expected: str, advice: str) -> Iterator[None]:
    """Context manager: raises ValueError if a compiler rejects a name.

    Args:
      name: The name, or the beginning of it.
      expected: What the compiler accepts.
      advice: What to do about its other errors, if the version of the compiler does not fit.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error).splitlines()[0]
        if "INVALID_ARGUMENT" not in message and "Failed to parse" not in message:
            error.add_note(
                f"While a compiler was asked for {name!r}. If its version does not fit: {advice}"
            )
            raise
        raise ValueError(f"name: expected {expected}, got {name!r}: {message}") from None


# Devices that are described twice are not equal, so a mesh of the one would not suit the other.
@functools.cache
def _describe(platform: str, name: str, **options: str) -> tuple[jax.Device, ...]:
    # Imported here, since few programs need it.
    from jax.experimental import topologies

    with quiet_compiler():
        described = topologies.get_topology_desc(platform=platform, topology_name=name, **options)
    return tuple(described.devices)


# Lines that the compilers write without a device, and that ask for nothing to be done. That a
# program needs more memory than the compiler aims at, `functrain.inspect.memory` reports.
_HARMLESS = (
    r"accelerator type|TPU_WORKER_HOSTNAMES|InitGoogle|InitializeLog|Source Location Trace"
    r"|libtpu_init_utils|cudart_stub|SortRewriter|autotun|hlo_rematerialization"
)
_FILTER = """
import re, sys
for line in sys.stdin.buffer:
    if line.strip() and not re.search(sys.argv[1].encode(), line):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
"""

# The descriptors of a process are those of all its threads, which may compile at the same time.
_lock = threading.Lock()
_num_quiet = 0
_redirection = contextlib.ExitStack()


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Context manager: drops what compilers write about a device that is not there."""
    global _num_quiet
    with _lock:
        if not _num_quiet:
            _redirection.enter_context(_filtered_stderr())
        _num_quiet += 1
    try:
        yield
    finally:
        with _lock:
            _num_quiet -= 1
            if not _num_quiet:
                _redirection.close()


@contextlib.contextmanager
def _filtered_stderr() -> Iterator[None]:
    """Context manager: drops harmless lines that are written to the file descriptor of stderr."""
    # It is None in a program without a console.
    if sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    # Another process, which still writes the last lines of this one if the compiler crashes.
    command = [sys.executable, "-ISc", _FILTER, _HARMLESS]
    lines_filter = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=2, start_new_session=True
    )
    assert lines_filter.stdin is not None
    original = os.dup(2)
    # The compilers write to the file descriptor, past sys.stderr.
    os.dup2(lines_filter.stdin.fileno(), 2)
    lines_filter.stdin.close()
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        # It ends later if another thread has started a process meanwhile, which writes to it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            lines_filter.wait(timeout=5)


def _target_config(gpu: Gpu) -> str:
    """Returns a target configuration, in the text form of XLA's GpuTargetConfigProto."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_per_block}
  shared_memory_per_core: {gpu.shared_per_core} l2_cache_size: {gpu.l2_cache}
  core_count: {gpu.cores} fpus_per_core: {gpu.units_per_core} clock_rate_ghz: {gpu.clock_ghz}
  memory_bandwidth: {gpu.bandwidth} device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {gpu.capability} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{gpu.description}"
"""


def _chip_of_config(config: str) -> Chip:
    """Returns the chip of a target configuration: one that is known, or its own figures."""
    name = _field(config, r'device_description_str: *"([^"]*)"')
    memory = int(_field(config, r"device_memory_size: *(\d+)"))
    bandwidth, clock = (
        float(_field(config, rf"{field}: *([\d.e+]+)"))
        for field in ("memory_bandwidth", "clock_rate_ghz")
    )
    described = Chip(name, memory, bandwidth, 0.0, clock * 1e9, "its target configuration")
    return known_chip(name) or described


def _field(config: str, pattern: str) -> str:
    match = re.search(pattern, config)
    field = pattern.partition(":")[0]
    require(match, "name", f"a target configuration with {field}", config[:80])
    assert match is not None
    return match[1]
