"""Data of which each process holds a part, assembled into global batches."""

import math
import zlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._gather import allgather, gather_from_processes
from functrain.common._types import PyTree
from functrain.data._batches import Batches, Chunk


class Local:
    """Data of which each process holds a part; see `functrain.distributed.local`.

    Args:
      data: This process's part.
      sharding: The sharding of a global batch.

    Raises:
      TypeError: `sharding` is not a NamedSharding.
      ValueError: It does not divide the examples among all processes.
    """

    def __init__(self, data: Any, sharding: NamedSharding) -> None:
        expected = "that of a global batch, jax.NamedSharding(mesh, jax.P('data'))"
        is_named = isinstance(sharding, NamedSharding)
        require(is_named, "sharding", expected, sharding, error=TypeError)
        self.data, self.sharding = data, sharding
        self._shards = _shard_of_each_device(sharding)
        self.processes = len({device.process_index for device in self._shards})
        # Sets, since several devices may hold the same shard.
        own = [device for device in self._shards if device.process_index == jax.process_index()]
        shards, local_shards = len(set(self._shards.values())), len({self._shards[x] for x in own})
        # Equal shares: with fewer shards than processes, some would hold the same examples.
        is_even = local_shards * self.processes == shards
        expected = f"one that divides examples evenly over {self.processes} processes"
        advice = f"It gives this process {local_shards} of {shards} shards; order the mesh's axes."
        require(is_even, "sharding", expected, sharding, advice)

    def __repr__(self) -> str:
        return f"local({self.data!r}, {self.sharding.spec})"

    def shapes(self, batch: PyTree) -> PyTree:
        """Returns the shapes of a global batch, given a batch of this process."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(self._global_shape(x.shape), x.dtype), batch
        )

    def put(self, batches: PyTree) -> PyTree:
        """Assembles global arrays from the stacked batches of all processes."""
        chunked = NamedSharding(self.sharding.mesh, PartitionSpec(None, *self.sharding.spec))

        def assemble(x: Any) -> jax.Array:
            shape = (x.shape[0], *self._global_shape(x.shape[1:]))
            possible = divisible_sharding(shape, chunked)
            array: jax.Array
            if possible is chunked:
                array = jax.make_array_from_process_local_data(chunked, np.asarray(x), shape)
            else:
                # Devices then need examples of other processes.
                gathered = self._gather_examples(np.asarray(x))
                array = jax.make_array_from_callback(shape, possible, lambda index: gathered[index])
            return array

        return jax.tree.map(assemble, batches)

    def _gather_examples(self, x: np.ndarray) -> np.ndarray:
        """Returns the examples of all processes, in the order of the global array."""
        # A leaf without an axis of examples is the same in every process.
        if self.processes == 1 or x.ndim == 1:
            return x
        parts = allgather(x)
        devices = sorted(self._shards, key=self._shards.__getitem__)
        processes = dict.fromkeys(device.process_index for device in devices)
        return np.concatenate([parts[i] for i in processes], axis=1)

    def require_same(self, name: str, steps: int, batches: PyTree = ()) -> None:
        """Compares the number and the shapes of the next batches among the processes.

        Raises:
          ValueError: They are not the same. It is raised in every process.
        """
        if self.processes == 1:
            return
        specs = []
        for path, x in _tree.leaves_with_path(batches):
            shape = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            specs.append(f"{path} {_tree.strong_spec(shape)}")
        # Two numbers, not the texts: this runs before every chunk.
        summary = np.asarray([steps, zlib.crc32("\n".join(specs).encode())], np.uint32)
        summaries = allgather(summary)
        if (summaries == summaries[0]).all():
            return
        counts = ", ".join(f"{n} in process {i}" for i, n in enumerate(summaries[:, 0].tolist()))
        raise ValueError(
            f"{name}: expected as many batches, of the same shapes, in every process, got next "
            f"{counts}; in this process, of\n{_tree.bullets(specs)}\nGive each process the same "
            "number of examples; in training drop_remainder=True drops a smaller last batch."
        )

    def _global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0] * self.processes, *shape[1:]) if shape else shape


def local(data: Any, sharding: NamedSharding) -> Local:
    """Marks data as this process's part of a data set.

    Without it, all processes have the same data, and each uses the part for its devices. With it,
    no process reads the data of another: a batch consists of the batches of all processes, each of
    ``batch_size / processes`` examples, joined by `jax.make_array_from_process_local_data`. The
    data themselves choose the part of a process: with grain ``dataset[jax.process_index() ::
    jax.process_count()]`` or, in a `DataLoader`, ``grain.sharding.ShardByJaxProcess()``.

    Before each chunk the processes compare how many batches they have, so that all of them raise an
    error if those differ; this waits for the chunk before. A checkpoint stores the position of each
    process in its part: resume with the same number of processes.

    Args:
      data: The part of this process, in batches: an `ArrayLoader`, or an iterable, as for
        `functrain.run`. For the functions of `bridge`, what Keras accepts, such as arrays.
      sharding: Sharding of a whole batch, such as ``NamedSharding(mesh, PartitionSpec("data"))``;
        the one that `fit` is given. It divides examples over all processes.

    Returns:
      Data for `fit` (``eval_data=``, too), `run`, `evaluate` and `predict`, whose outputs are in
      the order of the batches, and within a batch in the order of the mesh; and for the functions
      of `bridge`, in place of x.

    Raises:
      TypeError: `sharding` is not a NamedSharding.
      ValueError: Some processes would have the same part. In a run, also if processes have
        different numbers of batches, or batches of different shapes; it is raised in all of them.

    Examples:
      >>> import functrain as ft, jax, numpy as np
      >>> mesh = ft.sharding.mesh({"data": -1})
      >>> rows = jax.NamedSharding(mesh, jax.P("data"))
      >>> part = np.arange(64.0)[jax.process_index() :: jax.process_count()]
      >>> def step(total, batch):
      ...     return total + batch.sum(), {}
      >>> data = ft.distributed.local(ft.ArrayLoader(part, 8), rows)
      >>> float(ft.fit(0.0, step, data, sharding=rows, verbose=0).state)
      2016.0
    """
    return Local(data, sharding)


class LocalBatches(Batches):
    """Global batches, assembled from the batches of each process.

    Before each chunk the processes compare how many batches they have. Otherwise a process with
    more batches would wait forever for the others.

    Args:
      local_batches: The batches of this process.
      local: Assembles global batches.
    """

    def __init__(self, local_batches: Batches, local: Local) -> None:
        self._inner, self._local = local_batches, local
        self.data, self.name = local_batches.data, local_batches.name
        self.steps, self.full_steps = local_batches.steps, local_batches.full_steps
        self.can_seek, self.is_iterator = local_batches.can_seek, local_batches.is_iterator

    def begin(self, epoch: int, batch: int = 0) -> None:
        """Begins an epoch at one of its batches."""
        self._inner.begin(epoch, batch)

    def peek(self) -> PyTree | None:
        """Returns the shapes of the next batch; None if no process has one."""
        batch = self._inner.peek()
        if batch is None:
            # The other processes compare in `take`, if they have a batch.
            self._local.require_same(self.name, 0)
            return None
        return self._local.shapes(batch)

    def take(self, k: int, limit: int) -> Chunk:
        """Returns a chunk of the next global batches."""
        chunk = self._inner.take(k, limit)
        self._local.require_same(self.name, chunk.steps, chunk.batches)
        return chunk._replace(batches=self._local.put(chunk.batches))

    def first(self) -> PyTree | None:
        """Returns the shapes of the first batch; None if no process has one."""
        batch = self._inner.first()
        self._local.require_same(self.name, int(batch is not None))
        return None if batch is None else self._local.shapes(batch)

    def known_shapes(self) -> list[PyTree]:
        """Returns the shapes of all batches that are known before the first one is fetched."""
        return [self._local.shapes(batch) for batch in self._inner.known_shapes()]

    def fingerprint(self) -> dict[str, Any]:
        """Returns the number of batches and of processes."""
        # `restore` compares the part of each process, which may differ from that of the others.
        return {"data": "local", "batches": self.steps, "processes": self._local.processes}

    def track(self) -> None:
        """Begins to track the position in the part of this process."""
        self._inner.track()

    def state(self, *, epoch_is_over: bool) -> dict[str, Any]:
        """Returns the position of each process."""
        local_state = [self._inner.fingerprint(), self._inner.state(epoch_is_over=epoch_is_over)]
        # A checkpoint is written by one process, so it gets the positions of all.
        return {"each": gather_from_processes(local_state)}

    def restore(self, state: Any, epoch: int, batch: int) -> list[str]:
        """Continues at the position of this process."""
        saved_fingerprint, local_state = state["each"][jax.process_index()]
        fingerprint = self._inner.fingerprint()
        if saved_fingerprint != fingerprint:
            return [f"the part of this process: saved with {saved_fingerprint}, now {fingerprint}"]
        return self._inner.restore(local_state, epoch, batch)


def divisible_sharding(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding for a shape; axes that it does not divide evenly are not divided."""
    entries = []
    for length, entry in zip(shape, sharding.spec, strict=False):
        entries.append(entry if length % _mesh_size(sharding, entry) == 0 else None)
    # The same object if nothing changes, by which `Local.put` recognizes the usual case.
    is_possible = entries == list(sharding.spec)
    return sharding if is_possible else NamedSharding(sharding.mesh, PartitionSpec(*entries))


def _mesh_size(sharding: NamedSharding, entry: Any) -> int:
    """Returns the number of shards that an entry of a PartitionSpec makes of an axis."""
    # An entry is the name of a mesh axis, a tuple of names, or None.
    names = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(map(sharding.mesh.shape.__getitem__, names))


def _shard_of_each_device(sharding: NamedSharding) -> dict[jax.Device, int]:
    """Returns the number of the shard of the examples that each device holds."""
    entry = sharding.spec[0] if len(sharding.spec) else None
    by_axis = NamedSharding(sharding.mesh, PartitionSpec(entry))
    # The indices for an array with one element a shard are the numbers of the shards.
    indices: Any = by_axis.devices_indices_map((_mesh_size(sharding, entry),))
    return {device: index[0].start or 0 for device, index in indices.items()}
