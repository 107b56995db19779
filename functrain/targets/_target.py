"""A target: devices to compile for, by name."""

import dataclasses
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from functrain.common import _repr, _tree
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.sharding._mesh import mesh as make_mesh
from functrain.targets._chips import Chip, chip_of
from functrain.targets._compilers import cuda_devices, known_targets, tpu_devices


@dataclasses.dataclass(frozen=True, repr=False)
class Target:
    """Devices that programs are compiled for, from `target`. They need not be there.

    Attributes:
      name: The name that it was made from. That of the platform for the devices of this machine,
        and that of the GPU for a target configuration.
      platform: "cpu", "gpu" or "tpu".
      devices: The devices. Those that are not there can only be compiled for: arrays cannot be put
        on them.
      chip: The memory, bandwidth and speed of each device, with their source.

    Examples:
      >>> import functrain as ft, jax
      >>> here = ft.target()
      >>> here.platform == jax.default_backend(), len(here.devices) == jax.device_count()
      (True, True)
    """

    name: str
    platform: str
    devices: tuple[jax.Device, ...]
    chip: Chip

    def __repr__(self) -> str:
        count = f"{len(self.devices)} × " if len(self.devices) > 1 else ""
        memory = _repr.format_bytes(self.chip.memory_bytes)
        return f"Target({self.name!r}: {count}{self.chip.name}, {memory} each)"

    def mesh(self, axes: Mapping[str, int], *, explicit: bool = False) -> Mesh:
        """Returns a mesh of the target's devices; see `functrain.sharding.mesh`.

        Args:
          axes: The size of each axis, by name. One size may be -1, which stands for all remaining
            devices.
          explicit: True to make shardings part of the types of arrays.

        Raises:
          TypeError: `axes` is not a mapping.
          ValueError: The sizes do not use all devices.
          NotImplementedError: The connections between the devices allow no such mesh.

        Examples:
          >>> import functrain as ft
          >>> mesh = ft.target().mesh({"data": -1})
          >>> mesh.axis_names
          ('data',)
        """
        return make_mesh(axes, explicit=explicit, devices=self.devices)

    def shapes(self, tree: PyTree, sharding: PyTree = None) -> PyTree:
        """Returns the shapes of a tree, placed on the target for `jax.jit(...).lower`.

        Args:
          tree: Arrays or their shapes.
          sharding: A sharding for all leaves, or a tree of shardings with the structure of `tree`,
            such as that of `functrain.sharding.shardings`. By default, the first device. Leaves
            that are placed on the target already keep their places.

        Returns:
          A tree of `jax.ShapeDtypeStruct`.

        Examples:
          >>> import functrain as ft, jax, jax.numpy as jnp
          >>> here = ft.target()
          >>> x = here.shapes(jnp.ones((128, 8)))
          >>> jax.jit(jnp.sum).lower(x).compile().cost_analysis()["flops"] > 0
          True
        """
        if sharding is None or isinstance(sharding, Sharding):
            chosen = sharding or SingleDeviceSharding(self.devices[0])
            return jax.tree.map(lambda x: self._place(x, chosen), tree)
        return jax.tree.map(self._place, tree, sharding)

    def _place(self, x: object, sharding: Sharding) -> jax.ShapeDtypeStruct:
        shape, present = _tree.shapes(x), getattr(x, "sharding", None)
        # An array of the machine at hand that was not put anywhere may be moved.
        if isinstance(present, Sharding) and getattr(x, "committed", True):
            sharding = present if present.device_set <= set(self.devices) else sharding
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def target(name: str | None = None) -> Target:
    """Returns devices to compile for, by name. They need not be there.

    The compilers of TPUs and NVIDIA GPUs run on any Linux machine, without the devices and without
    a driver. Programs of `functrain` are made for the devices on which the shapes of their
    arguments are placed, so `functrain.inspect.memory`, `functrain.inspect.cost` and
    ``functrain.fuse(step, k).lower(...)`` answer for a target as if it were there.

    Args:
      name: The target; by default the devices of this machine. Or one of:

        - ``"tpu:v5e:4x4"``: a TPU slice by generation (v5e, v5p, v6e) and topology. Without
          a topology, such as ``"tpu:v5e"``, one chip.
        - ``"cuda:h100"``, ``"cuda:a100"``, ``"cuda:h200"``, ``"cuda:b200"``: one NVIDIA GPU. Its
          memory is all of the card's, of which jax takes 75 % unless
          ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says otherwise.
        - The text of a target configuration, as XLA writes it for a GPU of yours.

    Raises:
      ImportError: The compiler is not installed: ``pip install 'functrain[tpu]'`` or
        ``'functrain[cuda]'``.
      jax.errors.JaxRuntimeError: The version of the compiler does not fit that of jax, or it
        refuses a field of the target configuration.
      TypeError: `name` is not a text.
      ValueError: The name or the topology is unknown; the message lists those that are known. Or a
        target configuration lacks a field.

    Examples:
      >>> import functrain as ft
      >>> ft.target("tpu:v9")
      Traceback (most recent call last):
      ValueError: name: expected ...'tpu:v5e', ..., got 'tpu:v9'....
    """
    if name is None:
        devices, platform = tuple(jax.devices()), jax.default_backend()
        return Target(platform, platform, devices, chip_of(jax.local_devices()[0]))
    require(isinstance(name, str), "name", "the name of a target", name, error=TypeError)
    platform, _, device = name.partition(":")
    is_config = "gpu_device_info" in name
    if is_config or platform == "cuda":
        devices, chip = cuda_devices(name if is_config else device)
        return Target(chip.name if is_config else name, "gpu", devices, chip)
    expected = f"{known_targets()}, or a GPU's target configuration"
    advice = "Or no name, for the devices of this machine."
    require(platform == "tpu", "name", expected, name, advice)
    devices = tpu_devices(device)
    return Target(name, "tpu", devices, chip_of(devices[0]))
