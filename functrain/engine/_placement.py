"""Where batches and what a program carries lie on several devices."""

import re
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._gather import gather_from_processes
from functrain.common._types import PyTree
from functrain.data._batches import Batches
from functrain.data._local import divisible_sharding

ShardingArg: TypeAlias = NamedSharding | Mesh | PartitionSpec | None


def batch_sharding(sharding: Any) -> NamedSharding | None:
    """Returns where a batch is to lie, from what a user says.

    Args:
      sharding: A NamedSharding; a Mesh of one axis, over which examples are then divided; a
        PartitionSpec, within ``jax.set_mesh``; or None.

    Raises:
      TypeError: It is something else.
      ValueError: The mesh has several axes, or there is no mesh for the PartitionSpec.
    """
    if sharding is None or isinstance(sharding, NamedSharding):
        return sharding
    if isinstance(sharding, Mesh):
        if len(sharding.axis_names) != 1:
            raise ValueError(
                f"sharding: expected to be told over which of the axes {sharding.axis_names} "
                "examples are divided, got the mesh alone. Pass "
                "jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))."
            )
        return NamedSharding(sharding, PartitionSpec(sharding.axis_names[0]))
    if isinstance(sharding, PartitionSpec):
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ValueError(
                f"sharding: expected a mesh to go with {sharding}, got none. Pass "
                f"jax.sharding.NamedSharding(mesh, {sharding}), or call within jax.set_mesh(mesh)."
            )
        return NamedSharding(mesh, sharding)
    raise TypeError(
        "sharding: expected that of a batch, jax.sharding.NamedSharding(mesh, "
        f"jax.sharding.PartitionSpec('data')), got {sharding!r}"
    )


def is_explicit(sharding: NamedSharding | None) -> bool:
    """Whether shardings are part of arrays' types: a step can be traced on such a mesh only."""
    return sharding is not None and jax.sharding.AxisType.Explicit in sharding.mesh.axis_types


def chunk_placer(
    sharding: NamedSharding | None, *, replicates: bool = False
) -> Callable[[PyTree], PyTree]:
    """Returns what puts a chunk on the devices: a batch's sharding, with K in front.

    Args:
      sharding: Of one batch.
      replicates: True to give all devices the whole of a batch that they do not divide, instead of
        raising ValueError.
    """
    if sharding is None:
        return lambda batches: batches
    chunked, compared = _chunked(sharding), False

    def place(batches: PyTree) -> PyTree:
        nonlocal compared
        if not (compared or chunked.is_fully_addressable):
            # The first chunk: to compare all of them would take longer than a step.
            _require_same_everywhere(batches)
            compared = True
        if replicates:
            return jax.tree.map(lambda x: _put(x, divisible_sharding(x.shape, chunked)), batches)
        _refuse_indivisible(batches, chunked, sharding.spec)
        return _put(batches, chunked)

    return place


def place_batch(batch: PyTree, sharding: NamedSharding | None) -> PyTree:
    """Puts one batch on the devices, of which every process has all."""
    if sharding is None:
        return batch
    _refuse_indivisible(batch, sharding, sharding.spec)
    return _put(batch, sharding)


def _put(batches: PyTree, where: NamedSharding) -> PyTree:
    if where.is_fully_addressable:
        return jax.device_put(batches, where)
    return jax.tree.map(lambda x: _own_part(x, where), batches)


def chunk_shapes(batch: PyTree, k: int, sharding: NamedSharding | None) -> PyTree:
    """Returns what k batches look like as a chunk in its place."""
    where = None if sharding is None else _chunked(sharding)
    found = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((k, *x.shape), x.dtype, sharding=where), _tree.shapes(batch)
    )
    if sharding is not None and where is not None:
        _refuse_indivisible(found, where, sharding.spec)
    return found


def _chunked(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _own_part(x: Any, where: NamedSharding) -> Any:
    """Takes this process's part of an array that every process has."""
    if _is_shared(x):
        return jax.device_put(x, where)
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, where, lambda i: whole[i])


def _is_shared(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _require_same_everywhere(batches: PyTree) -> None:
    """Compares what the processes have, by its bytes."""
    digest = 0
    for path, x in _tree.leaves_with_path(batches):
        digest = zlib.crc32(f"{path} {_tree.strong_spec(x)}".encode(), digest)
        if not _is_shared(x):
            digest = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, digest)
    if len(set(gather_from_processes(digest))) > 1:
        raise ValueError(
            "data: expected the same batches in every process, of which jax takes each "
            "device's part, got others in this one. Give every process the whole data in the "
            "same order; data of which each has a part go into functrain.distributed.local."
        )


def require_same_program(program: Any, args: tuple[PyTree, ...]) -> None:
    """Refuses to run what is not the same program in every process: they would wait for ever.

    Raises:
      ValueError: In each process: the code, the shapes, or the number of steps are others.
    """
    text = _without_addresses(program.lower(*args).as_text())  # callbacks have some
    first, *others = gather_from_processes(zlib.crc32(text.encode()))
    if found := [str(i) for i, other in enumerate(others, 1) if other != first]:
        raise ValueError(
            "step: expected the same program in every process, got another in "
            f"{', '.join(found)} than in process 0. Run the same code, of the same versions, with "
            "the same arguments everywhere; what only one process does belongs into a hook."
        )


def require_same_run(batches: Batches, where: NamedSharding | None, **asked: Any) -> None:
    """Refuses to begin where processes have other data, or are asked for something else.

    Raises:
      ValueError: In each process, with what differs.
    """
    if where is None or where.is_fully_addressable:
        return
    said = {**batches.fingerprint(), "sharding": f"{where.spec} over {dict(where.mesh.shape)}"}
    each = gather_from_processes(
        {**said, **{name: _without_addresses(repr(x)) for name, x in asked.items()}}
    )
    lines = [
        f"{name}: {first} in process 0, {other.get(name, 'nothing')} in process {i}"
        for name, first in each[0].items()
        for i, other in enumerate(each)
        if other.get(name, "nothing") != first
    ]
    if lines:
        raise ValueError(
            f"{batches.name}: expected the same in every process, got\n{_tree.bullets(lines)}\n"
            "Nothing was run. Give every process the same data and arguments; of data of which "
            "each has a part, functrain.distributed.local, as many batches."
        )


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "", text)


def require_divisible(batches: Batches, sharding: NamedSharding | None) -> None:
    """Refuses batches that the devices do not divide, as far as they are known before a run."""
    if sharding is None:
        return
    for batch in batches.known_shapes():
        _refuse_indivisible(batch, sharding, sharding.spec, f"{batches.name}: ")


def _refuse_indivisible(
    batches: PyTree, where: NamedSharding, spec: PartitionSpec, name: str = ""
) -> None:
    lines = []
    for path, x in _tree.leaves_with_path(batches):
        try:
            where.shard_shape(x.shape)
        except ValueError:
            lines.append(f"{path}: {_tree.spec(x)}")
    if lines:
        raise ValueError(
            f"{name}sharding: expected batches that divide over {spec} of the mesh, got\n"
            f"{_tree.bullets(lines)}\nTake a batch size that the devices divide, and in training "
            "drop_remainder=True where the last batch is smaller."
        )


def place_on_mesh(carry: PyTree, sharding: NamedSharding | None) -> PyTree:
    """Copies what is on no particular device to all devices of a mesh.

    Left where it is, the first program would move it, and the second find it elsewhere than it
    was compiled for.
    """
    if sharding is None or not _counts(sharding.mesh):
        return carry
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())

    def place(x: Any) -> Any:
        return x if getattr(x, "committed", False) else _tree.device_put(x, everywhere)

    return jax.tree.map(place, carry)


def spans_processes(carry: PyTree, sharding: NamedSharding | None) -> bool:
    """Returns True if programs run on devices of several processes: each must begin them."""
    if sharding is not None and not sharding.is_fully_addressable:
        return True
    return any(_is_shared(x) for x in jax.tree.leaves(carry))


def replicate_beside(small: PyTree, carry: PyTree) -> PyTree:
    """Copies a few numbers to all devices that a carry lies on, where it lies on several."""
    mesh = next(filter(None, map(_mesh, jax.tree.leaves(carry))), None)
    if mesh is None:
        return small
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: _tree.device_put(x, everywhere), small)


def _mesh(x: Any) -> Mesh | None:
    """Returns the mesh that an array lies on, where that is one that counts."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _counts(sharding.mesh):
        return None
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def _counts(mesh: Any) -> bool:
    """Whether lying on a mesh is more than lying on a device."""
    return mesh.size > 1 or jax.sharding.AxisType.Explicit in mesh.axis_types


class Pins(NamedTuple):
    """Where the leaves of a carry are to stay; hashable.

    Attributes:
      structure: The carry's.
      places: For each leaf; None where that is no question.
    """

    structure: Any
    places: tuple[NamedSharding | None, ...]

    def tree(self) -> PyTree:
        """Returns the places in the carry's structure, as `jax.jit` takes them."""
        return jax.tree.unflatten(self.structure, self.places)


def read_pins(carry: PyTree) -> Pins | None:
    """Returns where the leaves of a carry are; None where all are on one device.

    Left to itself the compiler chooses the layout of what a loop carries: biases were seen to
    drift from replicated to sharded.
    """
    if jax.device_count() == 1:
        return None
    leaves, structure = jax.tree.flatten(carry)
    places = tuple(map(_place_of, leaves))
    return Pins(structure, places) if any(places) else None


def _place_of(x: Any) -> NamedSharding | None:
    mesh = _mesh(x)
    if mesh is None:
        return None
    # With explicit axes a sharding is part of an array's type, and cannot drift.
    auto = jax.sharding.AxisType.Auto
    return x.sharding if all(kind == auto for kind in mesh.axis_types) else None


def pin_carry(returned: Any, where: Pins | None) -> Any:
    """Keeps the carry of ``(carry, rows)`` where it was, inside a program."""
    if where is None or not isinstance(returned, tuple | list) or len(returned) != 2:
        return returned
    carry, rows = returned
    if _tree.structure(carry) != where.structure:
        return returned  # which is refused elsewhere, leaf by leaf
    kept = map(_stay, jax.tree.leaves(carry), where.places)
    return jax.tree.unflatten(where.structure, kept), rows


def _stay(x: Any, where: NamedSharding | None) -> Any:
    if where is None:
        return x
    return jax.lax.with_sharding_constraint(x if hasattr(x, "dtype") else jnp.asarray(x), where)
