"""The leaves of a state as a file knows them: by path, with a spec, as plain arrays."""

import dataclasses
import mmap
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from functrain.checkpoint._errors import CheckpointMismatchError
from functrain.checkpoint._processes import are_several, is_first
from functrain.common import _tree
from functrain.common._types import PyTree

# What Orbax stores as it is, in each of its versions; of other dtypes it gets the bytes.
_STORED = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
}
_ALIGNED = 64  # at such addresses XLA takes memory of NumPy's as it is
_MAPPED = 2**20  # bytes from which on a copy has a mapping of its own


def is_stored(dtype: np.dtype[Any]) -> bool:
    """Whether Orbax stores a dtype as it is."""
    return dtype.name in _STORED and dtype.isnative


class Leaf(NamedTuple):
    """A leaf in the memory of the host, where no program writes.

    Attributes:
      spec: Its dtype and shape, as messages have them.
      array: What Orbax writes.
      parts: The same memory, for digests, by where it is in the array; "" is all of it. Of an
        array that several processes have, those parts that this one writes.
    """

    spec: str
    array: Any
    parts: Mapping[str, np.ndarray]


def by_path(trees: dict[str, PyTree]) -> dict[str, Any]:
    """Returns the leaves of trees by their names in the file: that of the tree, and the path."""
    leaves: dict[str, Any] = {}
    folders = set[str]()
    for name, leaf in _tree.leaves_with_path(trees):
        folder = folder_of(name)
        if folder in folders:
            raise ValueError(
                f"{path_of(name)}: expected one leaf of this path, got two. Rename a key that has "
                "'/' in it."
            )
        folders.add(folder)
        leaves[name] = leaf
    return leaves


def folder_of(name: str) -> str:
    """Returns where in its database Orbax puts an array: "a" and "a/" go to the same place."""
    return name if name.endswith("/") else f"{name}/"


def root_of(name: str) -> str:
    """Returns the name of a leaf's tree."""
    return name.partition("/")[0]


def path_of(name: str) -> str:
    """Returns a leaf's path in its tree."""
    return name.partition("/")[2] or "(root)"


def on_host(leaves: Mapping[str, Any], *, copy: bool = False) -> dict[str, Leaf]:
    """Fetches leaves; waits for the programs that compute them, but for no disk.

    Args:
      leaves: By name.
      copy: Whether to copy arrays of the CPU, because programs go on that take over their memory.
        XLA would leave memory alone that NumPy looks at, and copy the array itself: into other
        memory at each save, in pieces that malloc does not give back (2 states more at the peak).

    Of arrays that several processes have, each one fetches its parts. What only it has is taken
    to be the same in all of them, and written by the first.

    Raises:
      TypeError: A leaf is no array of numbers.
      ValueError: A leaf was donated to a program.
    """
    plain = {name: _plain(path_of(name), leaf) for name, leaf in leaves.items()}
    near = jax.device_put(
        {n: x for n, x in plain.items() if isinstance(x, jax.Array) and x.size and not _shared(x)},
        host(),
    )
    several = are_several()
    found: dict[str, Leaf] = {}
    for name, x in plain.items():
        spec, array = _tree.strong_spec(leaves[name]), near.get(name, x)
        if _shared(array):
            found[name] = Leaf(spec, array, _own_parts(path_of(name), array))
            continue
        is_alias = copy and isinstance(x, jax.Array) and x.devices() == array.devices()
        # Orbax takes from several what is NumPy's
        if not isinstance(array, jax.Array) or several or is_alias:
            array = _own(np.asarray(array), move=not several)
        memory = np.asarray(array)
        parts = {"": memory} if is_first() else {}
        found[name] = Leaf(spec, array if is_stored(memory.dtype) else memory, parts)
    return found


def _shared(x: Any) -> bool:
    """Whether other processes have parts of an array."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _own_parts(path: str, array: jax.Array) -> dict[str, np.ndarray]:
    """Returns the parts that this process writes, one of each that several devices have."""
    if not is_stored(array.dtype):
        raise TypeError(
            f"{path}: expected a dtype that Orbax stores where several processes have parts of an "
            f"array, got {_tree.strong_spec(array)}. Cast it, or replicate it."
        )
    return {
        place(shard.index, array.shape): np.asarray(shard.data)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    }


def place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Returns where a part is, such as ``0:4,8:16``; "" for all of an array."""
    bounds = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
    if bounds == [(0, n) for n in shape]:
        return ""
    return ",".join(f"{begin}:{end}" for begin, end in bounds)


def slices(place: str) -> tuple[slice, ...]:
    """Returns the slices of a part."""
    bounds = (bound.split(":") for bound in place.split(","))
    return tuple(slice(int(begin), int(end)) for begin, end in bounds)


def part(array: np.ndarray, place: str) -> np.ndarray:
    """Returns the part of an array that is at a place."""
    found: np.ndarray = array[slices(place)]
    return found


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of an array that this process has, by where they are."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    by_place: Mapping[str, np.ndarray]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns one of the parts, given the indices of its elements in the array."""
        return self.by_place[place(index, self.shape)]


def own_places(like: Any, crc32: Any) -> list[str]:
    """Returns the places of the parts that this process is to read of a leaf; [] for all of it.

    Each of them has a digest if the leaf was saved with the sharding that it is to have.
    """
    sharding: Any = getattr(like, "sharding", None)
    is_shared = sharding is not None and not sharding.is_fully_addressable
    if not isinstance(crc32, Mapping) or not is_shared or _tree.is_key(like):
        return []
    indices = sharding.addressable_devices_indices_map(like.shape).values()
    places = {place(index, like.shape) for index in indices}
    return sorted(places) if places <= crc32.keys() else []


def _own(array: np.ndarray, move: bool) -> jax.Array | np.ndarray:
    """Copies an array of NumPy's, once: what Orbax gets from NumPy it would copy once more."""
    raw = _memory(array.nbytes + _ALIGNED)
    begin = -raw.ctypes.data % _ALIGNED
    copy = raw[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    if not move or not is_stored(array.dtype) or not array.size or host() is None:
        return copy
    with jax.enable_x64(True):
        near: jax.Array = jax.device_put(copy, host())
    return near


def _memory(size: int) -> np.ndarray:
    """Returns bytes that go back to the system at once when nothing refers to them any more.

    malloc keeps what it has freed, for the threads that freed it.
    """
    if size < _MAPPED:
        return np.empty(size, np.uint8)
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    how = {"flags": private} if private else {}  # none on Windows
    return np.frombuffer(mmap.mmap(-1, size, **how), np.uint8)


def host() -> jax.Device | None:
    """The host as a device; None where jax was told to do without."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _plain(path: str, leaf: Any) -> jax.Array | np.ndarray[Any, Any]:
    """The plain array that stands for a leaf in the file."""
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"{path}: expected a live array, got {_tree.strong_spec(leaf)} that was donated to "
                "a program. Save the state that the step returned, not the one it was given."
            )
        return jax.random.key_data(leaf) if _tree.is_key(leaf) else leaf
    if isinstance(leaf, np.ndarray | np.generic) and _is_numeric(leaf):
        return np.asarray(leaf)
    raise TypeError(
        f"{path}: expected an array of numbers, got {_tree.spec(leaf)}. Make it one with "
        "jnp.asarray, or keep it out of the state."
    )


def _is_numeric(leaf: np.ndarray | np.generic) -> bool:
    """Whether a leaf is numbers and nothing else: no texts, objects, records, and no mask."""
    known = leaf.dtype.kind in "biufc" or leaf.dtype.type.__module__ == "ml_dtypes"
    return known and not isinstance(leaf, np.ma.MaskedArray)


def digest(array: np.ndarray) -> str:
    """Returns the CRC-32 of an array's bytes, in C order."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"{zlib.crc32(data.data):08x}"


def require_same(directory: str, about: Mapping[str, Any], likes: dict[str, PyTree]) -> None:
    """Compares the leaves of trees with those of a checkpoint, before anything is read.

    Args:
      directory: The checkpoint.
      about: What it says of itself.
      likes: The trees, by name in the file.

    Raises:
      CheckpointMismatchError: Names each leaf that differs.
    """
    expected = {name: _tree.strong_spec(leaf) for name, leaf in by_path(likes).items()}
    every = about["leaves"].items()
    saved = {name: said["spec"] for name, said in every if root_of(name) in likes}
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


def blank(leaf: Any) -> np.ndarray:
    """Returns an array in host memory of the kind that stands for a leaf in the file."""
    like = jax.eval_shape(jax.random.key_data, leaf) if _tree.is_key(leaf) else leaf
    return np.empty(like.shape, like.dtype)


def restored(path: str, like: Any, data: Any) -> Any:
    """Makes a leaf like another of what was read: in its place, of its kind."""
    if isinstance(like, np.ndarray | np.generic):
        return data if isinstance(like, np.ndarray) else data[()]
    # Of what is not committed none: it moves freely then, as a fresh array does.
    sharding = getattr(like, "sharding", None) if getattr(like, "committed", True) else None
    if sharding is None:
        array = jnp.array(data)
    elif sharding.is_fully_addressable:
        array = jax.device_put(data, sharding)
    else:
        array = jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
    if array.dtype != data.dtype:
        raise ValueError(
            f"{path}: expected {data.dtype}, which jax cannot hold now, got {array.dtype}. "
            "Set jax.config.update('jax_enable_x64', True) before loading."
        )
    if not _tree.is_key(like):
        return array
    impl: list[Any] = []  # key_impl takes no abstract key from outside, but a traced one
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(array, impl=impl[0])
