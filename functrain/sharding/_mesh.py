"""Creates a mesh from the sizes of its axes."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from functrain.common._checks import is_integer, require, require_instance


def mesh(
    axes: Mapping[str, int], *, explicit: bool = False, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Returns a mesh of devices with named axes.

    Args:
      axes: The size of each axis, by name. One size may be -1, which stands for all remaining
        devices.
      explicit: True to make shardings part of the types of arrays (`jax.sharding.AxisType`). By
        default the compiler chooses the shardings that the code does not specify.
      devices: The devices to use; by default all devices of all processes.

    Returns:
      A mesh of all these devices, in an order that suits the machine (`jax.make_mesh`).

    Raises:
      TypeError: `axes` is not a mapping.
      ValueError: The sizes do not use all devices.
      NotImplementedError: The connections between the devices allow no such mesh.

    Examples:
      >>> import jax
      >>> two_axes = mesh({"data": -1, "model": 1})
      >>> two_axes.shape["data"] == jax.device_count()
      True
    """
    device_count = jax.device_count() if devices is None else len(devices)
    require_instance("axes", axes, Mapping, "sizes by name, such as {'data': -1}")
    sizes = dict(axes)
    fixed_sizes = [size for size in sizes.values() if size != -1]
    is_valid = len(sizes) - len(fixed_sizes) <= 1 and all(is_integer(n, 1) for n in fixed_sizes)
    expected = "sizes of at least 1, by name, and -1 for at most one of them"
    require(sizes and is_valid, "axes", expected, sizes)
    remaining = device_count // math.prod(fixed_sizes)
    sizes = {name: remaining if size == -1 else size for name, size in sizes.items()}
    expected = f"sizes whose product is {device_count}, the number of devices"
    advice = "Change the sizes, or use some of the devices only: devices=jax.devices()[:n]."
    require(math.prod(sizes.values()) == device_count, "axes", expected, dict(axes), advice)
    # Stated in both cases: recent versions of jax make axes explicit by default.
    axis_type = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes), devices=devices
    )
