"""Puts batches and carries on several devices, and keeps them there."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._types import PyTree
from functrain.data._batches import Batches
from functrain.data._local import divisible_sharding
from functrain.engine._processes import has_remote_shards, require_same_batches

ShardingArg: TypeAlias = NamedSharding | Mesh | PartitionSpec | None


def batch_sharding(sharding: Any) -> NamedSharding | None:
    """Converts the argument `sharding` to the sharding of a batch.

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
        axes = sharding.axis_names
        advice = "Pass jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))."
        expected = "a mesh of one axis, or the axis over which examples are divided"
        require(len(axes) == 1, "sharding", expected, axes, advice)
        return NamedSharding(sharding, PartitionSpec(axes[0]))
    expected = (
        "that of a batch, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))"
    )
    is_spec = isinstance(sharding, PartitionSpec)
    require(is_spec, "sharding", expected, sharding, error=TypeError)
    mesh = jax.sharding.get_mesh()
    advice = (
        f"Pass jax.sharding.NamedSharding(mesh, {sharding}), or call within jax.set_mesh(mesh)."
    )
    require(not mesh.empty, "sharding", f"a mesh for {sharding}", None, advice)
    return NamedSharding(mesh, sharding)


def is_explicit(sharding: NamedSharding | None) -> bool:
    """Returns True if the mesh has explicit axes: a step can then be traced on that mesh only."""
    return sharding is not None and jax.sharding.AxisType.Explicit in sharding.mesh.axis_types


def chunk_placer(
    sharding: NamedSharding, *, replicates: bool = False
) -> Callable[[PyTree], PyTree]:
    """Returns a function that puts a chunk on the devices: a batch's sharding, after an axis of K.

    Args:
      sharding: The sharding of one batch.
      replicates: True to replicate a batch that the devices do not divide evenly, instead of
        raising ValueError.
    """
    chunked, is_compared = _chunk_sharding(sharding), False

    def place(batches: PyTree) -> PyTree:
        nonlocal is_compared
        if not (is_compared or chunked.is_fully_addressable):
            # Only the first chunk: comparing all of them would take longer than a step.
            require_same_batches(batches)
            is_compared = True
        if replicates:
            return jax.tree.map(lambda x: _put(x, divisible_sharding(x.shape, chunked)), batches)
        return _put(batches, chunked)

    return place


def _put(batches: PyTree, sharding: NamedSharding) -> PyTree:
    shardings = jax.tree.map(lambda x: _leaf_sharding(x.shape, sharding), batches)
    if sharding.is_fully_addressable:
        return jax.device_put(batches, shardings)
    # `device_put` compares the values among all processes each time; `chunk_placer` has compared
    # the first chunk.
    return jax.tree.map(_put_shards, batches, shardings)


def _leaf_sharding(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding without the axes that a leaf lacks, such as labels `[B]` of sequences."""
    spec = sharding.spec[: len(shape)]
    is_whole = len(spec) == len(sharding.spec)
    return sharding if is_whole else NamedSharding(sharding.mesh, PartitionSpec(*spec))


def chunk_shapes(batch: PyTree, k: int, sharding: NamedSharding | None) -> PyTree:
    """Returns the shapes and shardings of a chunk of k batches."""
    chunked = None if sharding is None else _chunk_sharding(sharding)

    def add_axis(x: Any) -> jax.ShapeDtypeStruct:
        shape = (k, *x.shape)
        leaf_sharding = None if chunked is None else _leaf_sharding(shape, chunked)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=leaf_sharding)

    return jax.tree.map(add_axis, _tree.shapes(batch))


def _chunk_sharding(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def _put_shards(x: Any, sharding: NamedSharding) -> Any:
    """Puts this process's shards of an array, which every process holds in full, on its devices."""
    if has_remote_shards(x):
        return jax.device_put(x, sharding)
    array = np.asarray(x)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def require_divisible(batches: Batches, sharding: NamedSharding) -> None:
    """Raises ValueError if devices cannot divide batches evenly, for shapes known in advance."""
    expected = f"batches that divide evenly over {sharding.spec} of the mesh"
    advice = (
        "Choose a batch size that is a multiple of the number of devices, and in training leave a "
        "smaller last batch out, as a loader with drop_remainder=True does."
    )
    for batch in batches.known_shapes():
        lines = []
        for path, x in _tree.leaves_with_path(batch):
            divided = sharding.spec[: len(x.shape)]
            if tuple(divisible_sharding(x.shape, sharding).spec) != tuple(divided):
                lines.append(f"{path}: {_tree.spec(x)}")
        require_no_problems(f"{batches.name}: sharding", lines, expected, advice)


def place_on_mesh(carry: PyTree, sharding: NamedSharding | None) -> PyTree:
    """Replicates the uncommitted arrays of a carry over a mesh.

    Otherwise the first program would move them, and return them with a sharding that the second
    program was not compiled for.
    """
    if sharding is None or not _is_relevant(sharding.mesh):
        return carry
    replicated = NamedSharding(sharding.mesh, PartitionSpec())

    def place(x: Any) -> Any:
        return x if getattr(x, "committed", False) else _tree.device_put(x, replicated)

    return jax.tree.map(place, carry)


def abstract_on_mesh(state: PyTree, sharding: NamedSharding | None) -> PyTree:
    """Returns a state's shapes and dtypes, with the shardings that `place_on_mesh` would give it.

    The state may be abstract itself. No array is made, and none stays in memory.
    """
    has_mesh = sharding is not None and _is_relevant(sharding.mesh)
    default = NamedSharding(sharding.mesh, PartitionSpec()) if sharding and has_mesh else None

    def is_abstract(leaf: Any) -> bool:
        return isinstance(leaf, jax.ShapeDtypeStruct)

    def describe(leaf: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = leaf if is_abstract(leaf) else shape
        own = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=own or default)

    # Only a copy of the others checks that they are arrays.
    others = jax.tree.map(lambda x: 0 if is_abstract(x) else x, state)
    return jax.tree.map(describe, state, jax.eval_shape(lambda: _tree.copy(others)))


def spans_processes(carry: PyTree, sharding: NamedSharding | None) -> bool:
    """Returns True if programs run on devices of several processes, which all must start them."""
    if sharding is not None and not sharding.is_fully_addressable:
        return True
    return any(map(has_remote_shards, jax.tree.leaves(carry)))


def replicate_beside(small: PyTree, carry: PyTree) -> PyTree:
    """Puts a few numbers on the device of a carry, or replicates them over its mesh."""
    sharding = sharding_of_scalars(carry)
    if sharding is None:
        return small
    return jax.tree.map(lambda x: _tree.device_put(x, sharding), small)


def sharding_of_scalars(carry: PyTree) -> jax.sharding.Sharding | None:
    """Returns the sharding of numbers that a program takes beside a carry.

    That of its mesh, or of the device that it was put on; None if it was put nowhere. A number on
    another device would be moved at every call.
    """
    leaves = [x for x in jax.tree.leaves(carry) if _tree.is_concrete(x) and x.committed]
    mesh = next(filter(None, map(_relevant_mesh, leaves)), None)
    if mesh is not None:
        return NamedSharding(mesh, PartitionSpec())
    return leaves[0].sharding if leaves else None


def _relevant_mesh(x: Any) -> Mesh | None:
    """Returns the mesh of an array; None if it has none, or one like a single device."""
    # The mesh of a tracer is abstract: it has no devices.
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not _is_relevant(sharding.mesh):
        return None
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def _is_relevant(mesh: Any) -> bool:
    """Returns True if a mesh matters: it has several devices, or is part of arrays' types."""
    return mesh.size > 1 or jax.sharding.AxisType.Explicit in mesh.axis_types


class Pins(NamedTuple):
    """The shardings that the leaves of a carry keep in a program; hashable.

    Attributes:
      structure: The treedef of the carry.
      shardings: One for each leaf; None for a leaf that needs none.
    """

    structure: Any
    shardings: tuple[NamedSharding | None, ...]


def read_pins(carry: PyTree) -> Pins | None:
    """Returns the shardings of a carry's leaves; None if all are on one device.

    Without pins the compiler chooses the shardings of what a loop carries: biases were seen to
    drift from replicated to sharded.
    """
    leaves, structure = jax.tree.flatten(carry)
    shardings: list[NamedSharding | None] = []
    for x in leaves:
        mesh = _relevant_mesh(x)
        # With explicit axes a sharding is part of an array's type, and cannot drift.
        auto = jax.sharding.AxisType.Auto
        is_pinned = mesh is not None and all(kind == auto for kind in mesh.axis_types)
        shardings.append(x.sharding if is_pinned else None)
    return Pins(structure, tuple(shardings)) if any(shardings) else None


def pin_carry(carry: PyTree, pins: Pins | None) -> PyTree:
    """Constrains a carry to the pinned shardings, inside a program."""
    # A carry of another structure is an error that `check_carry` raises, leaf by leaf.
    if pins is None or _tree.structure(carry) != pins.structure:
        return carry
    leaves = jax.tree.leaves(carry)
    for i, sharding in enumerate(pins.shardings):
        if sharding is not None:
            # A step may return a Python number, which has no sharding to constrain.
            leaves[i] = jax.lax.with_sharding_constraint(jnp.asarray(leaves[i]), sharding)
    return jax.tree.unflatten(pins.structure, leaves)
