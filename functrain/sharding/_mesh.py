"""A mesh from the sizes of its axes."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from functrain.common._checks import is_integer


def mesh(
    axes: Mapping[str, int],
    *,
    explicit: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Returns a mesh of devices with named axes.

    Args:
      axes: The size of each axis; one of them may be -1, which takes the devices that are left.
      explicit: Whether shardings are part of the types of arrays (`jax.sharding.AxisType`);
        by default the compiler finds those that the code does not name.
      devices: Which; all of all processes by default.

    Returns:
      A mesh of all the devices, in an order that suits the machine (`jax.make_mesh`).

    Raises:
      ValueError: The sizes do not use all devices.

    Examples:
      >>> import jax
      >>> found = mesh({"data": -1, "model": 1})
      >>> found.shape["data"] == jax.device_count()
      True
    """
    count = jax.device_count() if devices is None else len(devices)
    sizes = dict(axes)
    open_axes = [name for name, size in sizes.items() if size == -1]
    known_sizes = [size for size in sizes.values() if size != -1]
    if not axes or len(open_axes) > 1 or not all(is_integer(size, 1) for size in known_sizes):
        raise ValueError(
            "axes: expected whole numbers from 1 on, by name, and -1 for one of them at the most, "
            f"got {dict(axes)}"
        )
    for name in open_axes:
        sizes[name] = count // math.prod(known_sizes)
    if math.prod(sizes.values()) != count:
        raise ValueError(
            f"axes: expected sizes whose product is {count}, the number of devices, got "
            f"{dict(axes)}. Take other sizes, or some of the devices: devices=jax.devices()[:n]."
        )
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices
    )
