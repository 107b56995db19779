"""The memory, bandwidth and speed of devices, as their makers state them."""

import os
from typing import NamedTuple

import jax
from jax.extend.backend import backends

from functrain.common._platform import platform_of
from functrain.common._types import PyTree

_GIB = 2**30
_VMEM = 128 * 2**20
_TPU = "https://cloud.google.com/tpu/docs/"
_GPU = "https://www.nvidia.com/en-us/data-center/"


class Chip(NamedTuple):
    """The figures of a device, from which estimates are made.

    Attributes:
      name: Its name.
      memory_bytes: The memory that a program can use.
      bandwidth: Bytes that it reads or writes in a second.
      peak_flops: Operations a second in products of bfloat16; 0 if unknown.
      clock_hz: Cycles a second; 0 if unknown.
      source: Where the figures are from.
      on_chip_bytes: The memory on the chip in which its compiler keeps the state of a loop, if it
        fits; 0 if it keeps none there, or if that is unknown.

    Examples:
      >>> import functrain as ft
      >>> ft.target().chip.memory_bytes > 0
      True
    """

    name: str
    memory_bytes: int
    bandwidth: float
    peak_flops: float
    clock_hz: float
    source: str
    on_chip_bytes: int = 0


# By the names that jax gives the devices. The memory of a TPU is what its compiler says that a
# program may use, some 2 % less than what the chip has (for v4 it is assumed). The clock of v5e is
# that of https://jax-ml.github.io/scaling-book; those of v4 and v5p follow from the peak of n
# matrix units of size s, which is 2 n s² operations a cycle, and that of v6e is assumed. Memory,
# bandwidth and clock of the GPUs are those of XLA's target configurations.
_CHIPS = {
    "TPU v4": Chip("TPU v4", int(30.75 * _GIB), 1.2e12, 275e12, 1.05e9, _TPU + "v4"),
    "TPU v5 lite": Chip("TPU v5e", int(15.75 * _GIB), 0.82e12, 197e12, 1.5e9, _TPU + "v5e", _VMEM),
    "TPU v5": Chip("TPU v5p", int(95.74 * _GIB), 2.77e12, 459e12, 1.75e9, _TPU + "v5p"),
    "TPU v6 lite": Chip("TPU v6e", int(31.25 * _GIB), 1.64e12, 918e12, 1.75e9, _TPU + "v6e", _VMEM),
    "NVIDIA A100-SXM4-80GB": Chip(
        "NVIDIA A100", 85_100_068_864, 2.03904e12, 312e12, 1.41e9, _GPU + "a100/"
    ),
    "NVIDIA H100 80GB HBM3": Chip(
        "NVIDIA H100", 84_942_979_072, 3.35232e12, 989e12, 1.98e9, _GPU + "h100/"
    ),
    "NVIDIA H200": Chip("NVIDIA H200", 151_397_597_184, 4.8e12, 989e12, 1.98e9, _GPU + "h200/"),
    "NVIDIA B200": Chip(
        "NVIDIA B200", 191_514_411_008, 7.67232e12, 2250e12, 1.965e9, _GPU + "dgx-b200/"
    ),
}


def chip_of(device: jax.Device) -> Chip:
    """Returns what is known about a device; what the system reports if it is not in the table."""
    try:
        stats = device.memory_stats() or {}
    except (RuntimeError, NotImplementedError):
        # Devices that are only compiled for.
        stats = {}
    chip, memory = known_chip(device.device_kind), int(stats.get("bytes_limit", 0))
    if chip is None:
        memory = memory or machine_memory()
        return Chip(device.device_kind, memory, 0.0, 0.0, 0.0, "reported by the system")
    # jax takes only a part of a GPU's memory, 75 % by default.
    return chip._replace(memory_bytes=min(chip.memory_bytes, memory or chip.memory_bytes))


def device_of(tree: PyTree) -> jax.Device:
    """Returns the device that a program of these arguments runs on, one of them if it has many."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None and getattr(leaf, "committed", True):
            # Those of other processes do not report their memory.
            return next(iter(sharding.addressable_devices or sharding.device_set))
    return jax.local_devices()[0]


def is_present(device: jax.Device) -> bool:
    """Returns True for a device that can run programs, False for one of a compiler without it."""
    return device.client in backends().values()


def accelerator_of(tree: PyTree) -> Chip | None:
    """Returns the accelerator that a program of these arguments runs on; None for a CPU.

    Its memory is that of the table, also if jax takes only a part of it. Otherwise K would differ
    between a device and its compiler, and so would the programs.
    """
    if platform_of(tree) == "cpu":
        return None
    device = device_of(tree)
    return known_chip(device.device_kind) or chip_of(device)


def on_chip_bytes(tree: PyTree) -> int:
    """Returns `Chip.on_chip_bytes` of the device that a program of these arguments runs on."""
    chip = accelerator_of(tree)
    return chip.on_chip_bytes if chip else 0


def known_chip(kind: str) -> Chip | None:
    """Returns the figures of a kind of device, by the name that jax gives it."""
    # "NVIDIA H200 141GB HBM3e" is an H200.
    starts = [name for name in _CHIPS if kind == name or kind.startswith(f"{name} 1")]
    return _CHIPS[starts[0]] if starts else None


def machine_memory() -> int:
    """Returns the memory of this machine, or a large number if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        # Windows has no sysconf; other systems may lack these names.
        return 2**63
