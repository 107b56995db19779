"""Data of which each process has a part: put together, batch by batch."""

import math
import zlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._gather import gather_from_processes
from functrain.common._types import PyTree
from functrain.data._batches import Batches, Chunk, WrappedBatches


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
            here = divisible_sharding(shape, where)
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


class LocalBatches(WrappedBatches):
    """Batches put together from the parts that the processes have.

    Before each chunk the processes compare how many batches they have: or those with more would
    wait forever for the others.

    Args:
      own: The batches of this process.
      local: How they are put together.
    """

    def __init__(self, own: Batches, local: Local) -> None:
        super().__init__(own)
        self._local = local

    def peek(self) -> PyTree | None:
        """Returns the shapes of the next batch; None if none of the processes has one."""
        batch = self._inner.peek()
        if batch is None:
            self._local.require_same(self.name, 0)
            return None
        return self._local.shapes(batch)

    def take(self, k: int, limit: int) -> Chunk:
        """Returns the next batches of all processes."""
        chunk = self._inner.take(k, limit)
        self._local.require_same(self.name, chunk.steps, chunk.batches)
        return chunk._replace(
            batches=self._local.put(chunk.batches),
            examples=chunk.examples * self._local.processes,
        )

    def first(self) -> PyTree | None:
        """Returns the shapes of the first batch; None if none of the processes has one."""
        batch = self._inner.first()
        self._local.require_same(self.name, int(batch is not None))
        return None if batch is None else self._local.shapes(batch)

    def full_batch(self) -> PyTree | None:
        """Returns the shapes of a batch of full size, if they are known."""
        batch = self._inner.full_batch()
        return None if batch is None else self._local.shapes(batch)

    def known_shapes(self) -> list[PyTree]:
        """Returns the shapes of every kind of batch, as far as they are known."""
        return [self._local.shapes(batch) for batch in self._inner.known_shapes()]

    def fingerprint(self) -> dict[str, Any]:
        """Returns the number of batches and of processes; each compares its own part itself."""
        return {"data": "local", "batches": self.steps, "processes": self._local.processes}

    def state(self, *, epoch_is_over: bool) -> dict[str, Any]:
        """Returns the position of each process."""
        own = [self._inner.fingerprint(), self._inner.state(epoch_is_over=epoch_is_over)]
        return {"each": gather_from_processes(own)}

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Continues at the position of this process."""
        saved, own_state = state["each"][jax.process_index()]
        now = self._inner.fingerprint()
        if saved != now:
            return [f"the part of this process: saved with {saved}, now {now}"]
        return self._inner.restore(own_state, epoch, batch)


def divisible_sharding(shape: tuple[int, ...], where: NamedSharding) -> NamedSharding:
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
