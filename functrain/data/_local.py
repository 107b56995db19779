"""Data of which each process has a part: put together, batch by batch."""

import math
import zlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.data._stacks import Spec, Stack


class Local:
    """Data of which each process has its own part; see `functrain.distributed.local`.

    Args:
      data: This process's part.
      sharding: Of a whole batch.

    Raises:
      TypeError: `sharding` is no NamedSharding.
      ValueError: It does not divide examples over all processes.
    """

    def __init__(self, data: Any, sharding: NamedSharding) -> None:
        if not isinstance(sharding, NamedSharding):
            raise TypeError(
                "sharding: expected that of a whole batch, jax.sharding.NamedSharding(mesh, "
                f"jax.sharding.PartitionSpec('data')), got {sharding!r}"
            )
        self.data, self.sharding = data, sharding
        devices: Any = sharding.device_set
        self.processes = len({device.process_index for device in devices})
        parts, own = _parts(sharding)
        if own * self.processes != parts:
            raise ValueError(
                f"sharding: expected one that divides examples over {self.processes} processes, "
                f"each with a part of its own, got {sharding.spec} over the mesh "
                f"{dict(sharding.mesh.shape)}, of whose {parts} parts this process has {own}. "
                "Take another order of axes, or give every process the same data, without local."
            )

    def __repr__(self) -> str:
        return f"local({self.data!r}, {self.sharding.spec})"

    def shapes(self, batch: PyTree) -> PyTree:
        """Returns what a batch is like as a whole."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(self._whole(x.shape), x.dtype), batch)

    def put(self, batches: PyTree) -> PyTree:
        """Puts stacked batches of all processes together: each has its part on its devices."""
        where = NamedSharding(self.sharding.mesh, PartitionSpec(None, *self.sharding.spec))

        def place(x: Any) -> jax.Array:
            shape = (x.shape[0], *self._whole(x.shape[1:]))
            here = divided_or_whole(shape, where)
            whole: jax.Array
            if here is where:
                whole = jax.make_array_from_process_local_data(where, np.asarray(x), shape)
            else:
                gathered = self._gathered(np.asarray(x))
                whole = jax.make_array_from_callback(shape, here, lambda index: gathered[index])
            return whole

        return jax.tree.map(place, batches)

    def _gathered(self, x: np.ndarray) -> np.ndarray:
        """Returns the examples of all processes, in the order that their devices have them in."""
        if self.processes == 1 or x.ndim == 1:
            return x
        from jax.experimental import multihost_utils

        parts = multihost_utils.process_allgather(x)
        return np.concatenate([parts[i] for i in _processes_in_order(self.sharding)], axis=1)

    def require_same(self, name: str, steps: int, batches: PyTree = ()) -> None:
        """Compares how many batches the processes have next, and of what shapes.

        Raises:
          ValueError: In all of them: it is not the same.
        """
        if self.processes == 1:
            return
        from jax.experimental import multihost_utils

        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
        specs = [f"{path} {_tree.strong_spec(x)}" for path, x in _tree.leaves_with_path(one)]
        own = np.asarray([steps, zlib.crc32("\n".join(specs).encode())], np.uint32)
        found = multihost_utils.process_allgather(own)
        if (found == found[0]).all():
            return
        counts = ", ".join(f"{n} in process {i}" for i, n in enumerate(found[:, 0].tolist()))
        shapes = f", here of\n{_tree.bullets(specs)}" if specs else ""
        raise ValueError(
            f"{name}: expected as many batches, of the same shapes, in every process, got next "
            f"{counts}{shapes}\nGive each process as many examples; in training "
            "drop_remainder=True leaves out what is left over."
        )

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] * self.processes, *shape[1:]) if shape else shape


class LocalPass:
    """A pass over this process's part of the data: what is handed out is whole.

    Before each chunk the processes compare how far they are: else those who have more would wait
    for ever for the others.
    """

    def __init__(self, inner: Any, local: Local, name: str) -> None:
        self._inner, self._local, self._name = inner, local, name

    @property
    def knows_sizes(self) -> bool:
        """Whether all batches are known to be alike, but for a smaller last one."""
        return bool(self._inner.knows_sizes)

    def usual(self) -> tuple[Spec, PyTree] | None:
        """Returns what batches of full size are like, if that is known."""
        found = self._inner.usual()
        return None if found is None else (found[0], self._local.shapes(found[1]))

    def spec(self) -> Spec | None:
        """Returns the kind of the next batch; None if none of the processes has one."""
        found = self._inner.spec()
        if found is None:
            self._local.require_same(self._name, 0)
        return found

    def peek(self) -> PyTree:
        """Returns the shapes of the next batch."""
        return self._local.shapes(self._inner.peek())

    @property
    def ahead(self) -> int:
        """How many batches were fetched to look at, and not handed out yet."""
        return int(self._inner.ahead)

    def take(self, most: int, k: int) -> Stack:
        """Hands out the next batches, with room for k."""
        local = self._local
        stack: Stack = self._inner.take(most, k)
        local.require_same(self._name, stack.steps, stack.batches)
        examples = stack.examples * local.processes
        return stack._replace(batches=local.put(stack.batches), examples=examples)


def divided_or_whole(shape: tuple[int, ...], where: NamedSharding) -> NamedSharding:
    """Returns the sharding, but without dividing the axes of an array that it cannot divide."""
    sizes = [math.prod(where.mesh.shape[name] for name in _names(axis)) for axis in where.spec]
    divides = [n % size == 0 for n, size in zip(shape, sizes, strict=False)]
    if all(divides) and len(shape) >= len(sizes):
        return where
    kept = [axis if ok else None for axis, ok in zip(where.spec, divides, strict=False)]
    return NamedSharding(where.mesh, PartitionSpec(*kept))


def _names(axis: Any) -> tuple[str, ...]:
    """Returns the axes of a mesh that an entry of a PartitionSpec names."""
    return (axis,) if isinstance(axis, str) else axis or ()


def _processes_in_order(sharding: NamedSharding) -> list[int]:
    """Returns the processes in the order in which they have examples."""
    axis = sharding.spec[0]
    parts = math.prod(sharding.mesh.shape[name] for name in _names(axis))
    by_axis = NamedSharding(sharding.mesh, PartitionSpec(axis))
    starts: Any = by_axis.devices_indices_map((parts,)).items()
    by_start = sorted(starts, key=lambda item: item[1][0].start or 0)
    return list(dict.fromkeys(device.process_index for device, _ in by_start))


def _parts(sharding: NamedSharding) -> tuple[int, int]:
    """Returns into how many parts examples are divided, and how many of them lie here."""
    axis = sharding.spec[0] if len(sharding.spec) else None
    parts = math.prod(sharding.mesh.shape[name] for name in _names(axis))
    by_axis = NamedSharding(sharding.mesh, PartitionSpec(axis))
    here = by_axis.addressable_devices_indices_map((parts,))
    return parts, len({index[0].start for index in here.values() if index is not None})
