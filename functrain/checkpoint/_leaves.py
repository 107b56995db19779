"""Conversion between the leaves of a state and the arrays that are stored for them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._processes import is_first
from functrain.common import _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._types import PyTree

Box = tuple[range, ...]  # a part of an array: its range on each axis
Index = tuple[slice, ...]
Reader = Callable[..., np.ndarray]  # returns the part of an array at an index; all by default


class Leaf(NamedTuple):
    """A leaf in host memory that no program writes to.

    Attributes:
      spec: Its dtype and shape as messages show them, such as ``float32[8, 3]``.
      stored_spec: Dtype and shape of the array in the file: of a PRNG key, those of its key data.
      shards: The parts that this process writes, each with its box in the whole array.
    """

    spec: str
    stored_spec: str
    shards: list[tuple[Box, np.ndarray]]


def named_leaves(trees: dict[str, PyTree]) -> dict[str, Any]:
    """Returns the leaves of trees by name: ``TREE/PATH``, such as ``state/params/w``."""
    leaves: dict[str, Any] = {}
    for name, leaf in _tree.leaves_with_path(trees):
        advice = "Rename a key that has '/' in it."  # {"a/b": x, "a": {"b": y}}
        require(name not in leaves, leaf_path(name), "one leaf of this path", 2, advice)
        leaves[name] = leaf
    return leaves


def tree_name(name: str) -> str:
    """Returns the tree in the name of a leaf."""
    return name.partition("/")[0]


def leaf_path(name: str) -> str:
    """Returns the path in the name of a leaf."""
    return name.partition("/")[2] or "(root)"


def box_at(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    """Returns the box of a shard's index; None is that of the whole array."""
    full_box = tuple(map(range, shape))
    if index is None:
        return full_box
    return tuple(side[part] for side, part in zip(full_box, index, strict=True))


def fetch_leaves(leaves: Mapping[str, Any], *, copy: bool = False) -> dict[str, Leaf]:
    """Fetches leaves to the host. Waits for the programs that compute them, but not for the disk.

    Of an array that is spread over processes, each process fetches its parts. An array that is
    whole in this process is assumed to be the same in all processes that have it. `copy` copies
    arrays that are in host memory already, in case the next programs donate them.
    """
    arrays: dict[str, Any] = {x: _to_storable(leaf_path(x), leaf) for x, leaf in leaves.items()}
    on_devices = {name: x for name, x in arrays.items() if isinstance(x, jax.Array)}
    local_arrays = {name: x for name, x in on_devices.items() if x.is_fully_addressable}
    # In one call, so that the transfers overlap.
    fetched = jax.device_put(local_arrays, cpu_device())

    def to_numpy(on_host: Any, source: Any) -> np.ndarray:
        # XLA cannot donate memory that NumPy refers to. Without a copy here, it would copy the
        # array to new memory at each save, in pieces that malloc keeps: 2 more states at the peak.
        is_alias = isinstance(source, np.ndarray) or source.devices() == {cpu_device()}
        data = np.asarray(on_host)
        return data.copy() if copy and is_alias else data

    result = {}
    for name, array in arrays.items():
        shards = []
        if name in on_devices and name not in fetched:
            for shard in array.addressable_shards:
                if shard.replica_id == 0:  # one of the processes that have this part writes it
                    box = box_at(shard.index, array.shape)
                    shards.append((box, to_numpy(shard.data, shard.data)))
        elif is_first():
            shards.append((box_at(None, array.shape), to_numpy(fetched.get(name, array), array)))
        result[name] = Leaf(_tree.strong_spec(leaves[name]), _tree.strong_spec(array), shards)
    return result


def _to_storable(path: str, leaf: Any) -> jax.Array | np.ndarray[Any, Any]:
    """Returns the plain array that is stored for a leaf."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        if leaf.is_deleted():
            raise ValueError(
                f"{path}: expected a live array, got {_tree.strong_spec(leaf)} that was donated to "
                "a program. Save the state that the step returned, not the one it was given."
            )
        return jax.random.key_data(leaf) if _tree.is_key(leaf) else leaf
    if isinstance(leaf, np.ndarray | np.generic):
        # NumPy's own numbers have these kinds; bfloat16, float8 and int4 are of ml_dtypes.
        is_numeric = leaf.dtype.kind in "biufc" or leaf.dtype.type.__module__ == "ml_dtypes"
        if is_numeric and not isinstance(leaf, np.ma.MaskedArray):
            return np.asarray(leaf)
    raise TypeError(
        f"{path}: expected an array of numbers with values, got {_tree.spec(leaf)}. Convert it by "
        "jnp.asarray, keep it out of the state, or call this outside of jit."
    )


def cpu_device() -> jax.Device | None:
    """Returns the host as a device; None if JAX was configured without its CPU backend."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def differences(manifest: Mapping[str, Any], likes: dict[str, PyTree]) -> list[str]:
    """Returns a line for each leaf of trees that a checkpoint lacks, or has in another form."""
    # Weak types count as strong ones: arrays are strongly typed when they are restored.
    expected = {name: _tree.strong_spec(leaf) for name, leaf in named_leaves(likes).items()}
    saved = {name: x["spec"] for name, x in manifest["leaves"].items() if tree_name(name) in likes}
    return _tree.spec_differences(expected, saved)


def require_leaves(directory: str, manifest: Mapping[str, Any], likes: dict[str, PyTree]) -> None:
    """Raises CheckpointMismatchError if a checkpoint has other leaves. No array is read."""
    require_no_problems(
        directory,
        differences(manifest, likes),
        "a checkpoint with the leaves of the state",
        "Nothing was loaded. Build the state with the model, the optimizer and the rng (or "
        "rng=None) that were saved; for a part of it: functrain.warm_start.",
        error=CheckpointMismatchError,
    )


def restore_leaf(path: str, like: Any, read: Reader) -> Any:
    """Reads an array and converts it to a leaf of the kind and sharding of another leaf."""
    # An array of NumPy stays one, and a scalar stays a scalar.
    if isinstance(like, np.ndarray | np.generic):
        return read() if isinstance(like, np.ndarray) else read()[()]
    plain = jax.eval_shape(lambda x: jax.random.key_data(x), like) if _tree.is_key(like) else like
    if jax.dtypes.canonicalize_dtype(plain.dtype) != plain.dtype:
        raise ValueError(
            f"{path}: expected {plain.dtype}, got jax with 64-bit types disabled. Set "
            "jax.config.update('jax_enable_x64', True) before loading."
        )
    # An uncommitted leaf stays uncommitted, so that programs may move it as any fresh array.
    sharding = getattr(like, "sharding", None) if getattr(like, "committed", True) else None

    if sharding is None or sharding.is_fully_addressable:
        array = jax.device_put(read(), sharding)  # jnp.array would copy twice
    else:  # each process reads its parts only
        # The dtype is stated for a process that has none of the parts.
        shape, dtype = plain.shape, plain.dtype
        array = jax.make_array_from_callback(shape, sharding, read, dtype=dtype)
    # Otherwise the buffers of all leaves would stay in memory until the transfers end.
    jax.block_until_ready(array)
    if not _tree.is_key(like):
        return array
    # `key_impl` refuses abstract keys, but takes traced ones.
    impl: list[Any] = []
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(array, impl=impl[0])
