"""Targets: the devices that programs are compiled for, with or without having them.

The compilers for TPUs and NVIDIA GPUs run on any machine. Given shapes that are placed on the
devices of a target, `jax.jit(...).lower(...).compile()` makes the program that those devices would
run.

Files:
  _chips: memory, bandwidth and speed of the devices, with sources
  _compilers: the devices of compilers that run without them
  _target: a target by its name
"""

from functrain.targets._chips import Chip as Chip
from functrain.targets._chips import chip_of as chip_of
from functrain.targets._target import Target as Target
from functrain.targets._target import target as target

__all__ = ["Chip", "Target", "chip_of", "target"]
