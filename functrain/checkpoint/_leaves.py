"""The leaves of a state: what is stored for each, by path, and how it becomes a leaf again."""

import mmap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._processes import is_first
from functrain.common import _tree
from functrain.common._types import PyTree

Box = tuple[slice, ...]  # a part of an array: begin and end on each axis
Read = Callable[..., np.ndarray]  # returns a part of an array, given its box, or all of it

_MAPPED = 2**20  # bytes from which on a copy has a mapping of its own


class Leaf(NamedTuple):
    """A leaf in the memory of the host, where no program writes.

    Attributes:
      spec: Its dtype and shape, as messages have them.
      stored: Dtype and shape of the array that is stored for it: of a PRNG key its numbers.
      shards: The parts that this process writes, each with where it is in the array.
    """

    spec: str
    stored: str
    shards: list[tuple[Box, np.ndarray]]


def by_path(trees: dict[str, PyTree]) -> dict[str, Any]:
    """Returns the leaves of trees by their names in the file: that of the tree, and the path."""
    leaves: dict[str, Any] = {}
    for name, leaf in _tree.leaves_with_path(trees):
        if name in leaves:
            raise ValueError(
                f"{path_of(name)}: expected one leaf of this path, got two. Rename a key that has "
                "'/' in it."
            )
        leaves[name] = leaf
    return leaves


def root_of(name: str) -> str:
    """Returns the name of a leaf's tree."""
    return name.partition("/")[0]


def path_of(name: str) -> str:
    """Returns a leaf's path in its tree."""
    return name.partition("/")[2] or "(root)"


def whole_box(shape: tuple[int, ...]) -> Box:
    """Returns the box of a whole array."""
    return tuple(slice(0, length) for length in shape)


def _box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Returns the index of a shard with its ends in numbers."""
    return tuple(slice(*x.indices(length)[:2]) for x, length in zip(index, shape, strict=True))


def on_host(leaves: Mapping[str, Any], *, copy: bool = False) -> dict[str, Leaf]:
    """Fetches leaves; waits for the programs that compute them, but for no disk.

    Of arrays that several processes have, each one fetches its parts. What only it has is taken
    to be the same in all of them, and written by the first.

    Args:
      leaves: By name.
      copy: Whether to copy what is in this memory already, because programs go on that take it
        over. XLA would leave memory alone that NumPy looks at, and copy the array itself: into
        other memory at each save, in pieces that malloc does not give back (2 states more).

    Raises:
      TypeError: A leaf is no array of numbers.
      ValueError: A leaf was donated to a program.
    """
    stored = {name: _stored(path_of(name), leaf) for name, leaf in leaves.items()}
    near = jax.device_put(  # all at once, so that they come side by side
        {n: x for n, x in stored.items() if isinstance(x, jax.Array) and x.is_fully_addressable},
        host(),
    )

    def memory(fetched: Any, source: Any) -> np.ndarray:
        is_alias = isinstance(source, np.ndarray) or source.devices() == {host()}
        return _copied(np.asarray(fetched)) if copy and is_alias else np.asarray(fetched)

    fetched = {}
    for name, x in stored.items():
        if isinstance(x, jax.Array) and name not in near:
            own = (shard for shard in x.addressable_shards if shard.replica_id == 0)
            shards = [(_box_of(s.index, x.shape), memory(s.data, s.data)) for s in own]
        else:
            shards = [(whole_box(x.shape), memory(near.get(name, x), x))] if is_first() else []
        fetched[name] = Leaf(_tree.strong_spec(leaves[name]), _tree.strong_spec(x), shards)
    return fetched


def _stored(path: str, leaf: Any) -> jax.Array | np.ndarray[Any, Any]:
    """Returns the plain array that is stored for a leaf."""
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"{path}: expected a live array, got {_tree.strong_spec(leaf)} that was donated to "
                "a program. Save the state that the step returned, not the one it was given."
            )
        return jax.random.key_data(leaf) if _tree.is_key(leaf) else leaf
    if isinstance(leaf, np.ndarray | np.generic):
        is_numeric = leaf.dtype.kind in "biufc" or leaf.dtype.type.__module__ == "ml_dtypes"
        if is_numeric and not isinstance(leaf, np.ma.MaskedArray):
            return np.asarray(leaf)
    raise TypeError(
        f"{path}: expected an array of numbers, got {_tree.spec(leaf)}. Make it one with "
        "jnp.asarray, or keep it out of the state."
    )


def _copied(array: np.ndarray) -> np.ndarray:
    """Copies an array into memory that goes back to the system with its last reference.

    malloc keeps what it has freed, for the threads that freed it.
    """
    if array.nbytes < _MAPPED:
        return array.copy()
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    how = {"flags": private} if private else {}  # none on Windows
    copy = np.frombuffer(mmap.mmap(-1, array.nbytes, **how), array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def host() -> jax.Device | None:
    """The host as a device; None where jax was told to do without."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def require_same(directory: str, manifest: Mapping[str, Any], likes: dict[str, PyTree]) -> None:
    """Raises CheckpointMismatchError, before anything is read, if a checkpoint has other leaves."""
    expected = {name: _tree.strong_spec(leaf) for name, leaf in by_path(likes).items()}
    records = manifest["leaves"].items()
    saved = {name: record["spec"] for name, record in records if root_of(name) in likes}
    lines = []
    for name in {**expected, **saved}:
        if name not in saved:
            lines += [f"{path_of(name)}: not in the checkpoint (expected {expected[name]})"]
        elif name not in expected:
            lines += [f"{path_of(name)}: not expected (saved {saved[name]})"]
        elif saved[name] != expected[name]:
            lines += [f"{path_of(name)}: saved {saved[name]}, expected {expected[name]}"]
    if lines:
        raise CheckpointMismatchError(
            f"{directory}: its leaves are not those expected:\n{_tree.bullets(lines)}\n"
            "Nothing was loaded. Build the state with the model, the optimizer and the rng (or "
            "rng=None) that were saved; for a part of it: functrain.warm_start."
        )


def restored(path: str, like: Any, read: Read) -> Any:
    """Makes a leaf like another of what is read: in its place, of its kind."""
    if isinstance(like, np.ndarray | np.generic):
        return read() if isinstance(like, np.ndarray) else read()[()]
    plain = jax.eval_shape(jax.random.key_data, like) if _tree.is_key(like) else like
    if jax.dtypes.canonicalize_dtype(plain.dtype) != plain.dtype:
        raise ValueError(
            f"{path}: expected {plain.dtype}, which jax cannot hold now. Set "
            "jax.config.update('jax_enable_x64', True) before loading."
        )
    # Of what is not committed none: it moves freely then, as a fresh array does.
    sharding = getattr(like, "sharding", None) if getattr(like, "committed", True) else None
    array: jax.Array
    if sharding is None or sharding.is_fully_addressable:
        array = jax.device_put(read(), sharding)  # jnp.array would copy twice
    else:  # no process takes memory for all of it
        indices = sharding.addressable_devices_indices_map(plain.shape).items()
        parts = [jax.device_put(read(_box_of(x, plain.shape)), device) for device, x in indices]
        array = jax.make_array_from_single_device_arrays(plain.shape, sharding, parts)
    jax.block_until_ready(array)  # else what was read stays in memory while more is read
    if not _tree.is_key(like):
        return array
    impl: list[Any] = []  # key_impl takes no abstract key from outside, but a traced one
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(array, impl=impl[0])
