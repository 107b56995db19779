"""Arrays, for programs that read safetensors."""

import collections
import glob
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import jax
import numpy as np

from functrain.checkpoint._arrays import DTYPES, write_arrays
from functrain.checkpoint._leaves import Leaf, box_at, fetch_leaves, leaf_path, named_leaves
from functrain.checkpoint._rename import Rename, Target, find_targets
from functrain.checkpoint._safetensors import INDEX
from functrain.common import _tree
from functrain.common._checks import require, require_integer, require_no_problems
from functrain.common._types import PyTree
from functrain.export._atomic import remove, require_free, write_together
from functrain.step._state import TrainState

# Without it, transformers takes no file.
_METADATA = {"format": "pt"}


def params(
    path: str | os.PathLike[str],
    params: PyTree,
    *,
    rename: Sequence[Rename] = (),
    shard_bytes: int | None = None,
    overwrite: bool = False,
) -> None:
    """Writes arrays to a safetensors file, each under its path or the name that a rule gives.

    `functrain.warm_start` reads it back, and so does any program that reads such files:
    ``safetensors.numpy.load_file(path)`` returns a dict by path, ``dense/kernel``. Bits and dtypes
    are kept. The file has no structure, and nothing in it can run code.

    Args:
      path: A file `.safetensors`. Missing folders are created.
      params: Any pytree of arrays: ``state.params``; or a dict of parts of a state. Of a
        TrainState, params and model_state are written, under their paths in the state.
      rename: The rules by which `functrain.warm_start` reads the file, one for each array. So the
        file has the names and layouts of another program.
      shard_bytes: If the arrays have more bytes than this, they are written to several files of at
        most so many, or of one array, such as ``model-00001-of-00003.safetensors``, with an index,
        ``model.safetensors.index.json``, as on Hugging Face.
      overwrite: True replaces an existing file, or those of an existing index, once all new ones
        are written.

    Raises:
      FileExistsError: The file or the index exists, and `overwrite` is False.
      OSError: The file cannot be written.
      TypeError: A leaf is not an array of numbers, or of a dtype that such files do not have.
      ValueError: `path` has another suffix, there are no arrays, an array has no rule, or two that
        differ get one name.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, safetensors.numpy, tempfile
      >>> params = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ft.export.params(f"{folder}/params.safetensors", params)
      ...     arrays = safetensors.numpy.load_file(f"{folder}/params.safetensors")
      ...     warm = ft.warm_start(params, f"{folder}/params.safetensors")
      >>> sorted(arrays), len(warm.loaded)
      (['dense/bias', 'dense/kernel'], 2)
    """
    target = require_free(path, overwrite=overwrite)
    require(target.endswith(".safetensors"), "path", "a name that ends in .safetensors", target)
    old = _files_of(target)
    for existing in old:
        require_free(existing, overwrite=overwrite)
    if shard_bytes is not None:
        require_integer("shard_bytes", shard_bytes)
    if isinstance(params, TrainState):
        params = {"params": params.params, "model_state": params.model_state}
    leaves = numbers_by_path(params)
    targets = targets_of(leaves, rename or (Rename("**", "**"),))
    remove(set(old) - _write_model(target, _shards(targets, leaves, shard_bytes), leaves))


def _write_model(target: str, shards: list[list[Target]], leaves: Mapping[str, Any]) -> set[str]:
    """Writes one file, or several and their index, and returns their names."""
    files, index = [target], _index_of(target)
    if len(shards) > 1:
        files = _shard_paths(target, len(shards))
    # Without its index no file is taken for a part of a model that another file is of.
    with write_together(index) as create:
        for path, shard in zip(files, shards, strict=True):
            with create(path) as file:
                write(file, shard, leaves)
        if len(shards) > 1:
            with create(index) as file:
                file.write(_index(files, shards, leaves))
    return {*files, index}


def numbers_by_path(params: PyTree) -> dict[str, Any]:
    """Returns the arrays of a tree by path, if all of them can be in a safetensors file."""
    leaves = {leaf_path(x): leaf for x, leaf in named_leaves({"params": params}).items()}
    require(leaves, "params", "a pytree with arrays", params)
    # An array that is spread over processes cannot be fetched by one of them.
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"expected to export from one process, got {jax.process_count()}. Save with "
            "functrain.save, and export from one process that loads it."
        )
    for path, leaf in leaves.items():
        is_number = not _tree.is_key(leaf) and str(getattr(leaf, "dtype", "")) in DTYPES.values()
        expected, advice = "an array of a dtype that safetensors has", "Convert or omit the array."
        require(is_number, path, expected, leaf, advice, error=TypeError)
    return leaves


def targets_of(leaves: Mapping[str, Any], rename: Sequence[Rename]) -> list[Target]:
    """Returns the arrays of a file; raises ValueError if a leaf has no rule that fits it."""
    targets = find_targets(leaves, rename)
    problems = []
    for target in targets:
        parts = [leaves[path] for path in target.paths]
        is_one_dtype = len({x.dtype for x in parts}) == 1
        if not (is_one_dtype and target.fits([x.shape for x in parts])):
            specs = (f"{path}: {_tree.strong_spec(leaves[path])}" for path in target.paths)
            problems.append(f"{', '.join(specs)} by {target.rule}")
    expected = "rules that have the axes of the leaves, and join leaves of one dtype"
    require_no_problems("rename", problems, expected)
    return _unique(targets, leaves)


def _index_of(target: str) -> str:
    return target.removesuffix(".safetensors") + INDEX


def _shard_paths(target: str, count: int) -> list[str]:
    stem = target.removesuffix(".safetensors")
    return [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _files_of(target: str) -> list[str]:
    """Returns the files that a model was written to, in one file or several."""
    stem = glob.escape(target.removesuffix(".safetensors"))
    shards = glob.glob(f"{stem}-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors")
    return [x for x in (target, _index_of(target), *shards) if os.path.lexists(x)]


def _unique(targets: Iterable[Target], leaves: Mapping[str, Any]) -> list[Target]:
    """Returns targets whose names differ: leaves that are equal, as tied weights, can share one."""
    by_names: dict[tuple[str, ...], Target] = {}
    for target in targets:
        other = by_names.setdefault(target.names, target)
        expected = f"equal leaves for {target.names[0]}, to which two rules give its name"
        advice, paths = "Leave one of them out of the tree.", [*other.paths, *target.paths]
        require(_are_equal(target, other, leaves), "rename", expected, paths, advice)
    counts = collections.Counter(name for names in by_names for name in names)
    # Each array is in one file, and the format has this name for its notes.
    problems = [x for x, count in counts.items() if count > 1 or x == "__metadata__"]
    require_no_problems("rename", problems, "names of one array each, none of them __metadata__")
    return list(by_names.values())


def _are_equal(target: Target, other: Target, leaves: Mapping[str, Any]) -> bool:
    """Returns True if two targets have the same bits."""
    if target is other:
        return True
    pairs = zip(*(_arrays(x, leaves).values() for x in (target, other)), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(_bytes(x), _bytes(y)) for x, y in pairs)


def _arrays(target: Target, leaves: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return target.arrays([np.asarray(leaves[path]) for path in target.paths])


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _shards(
    targets: Iterable[Target], leaves: Mapping[str, Any], shard_bytes: int | None
) -> list[list[Target]]:
    """Divides targets, in their order, into files of at most so many bytes, or of one target."""
    shards: list[list[Target]] = [[]]
    size = 0
    for target in targets:
        nbytes = _nbytes(target, leaves)
        if shards[-1] and shard_bytes is not None and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(target)
        size += nbytes
    return shards


def _nbytes(target: Target, leaves: Mapping[str, Any]) -> int:
    return sum(leaves[path].nbytes for path in target.paths)


def write(file: IO[bytes], targets: Iterable[Target], leaves: Mapping[str, Any]) -> None:
    """Writes arrays into an open file. Only these are fetched."""
    paths = {path for target in targets for path in target.paths}
    fetched = fetch_leaves({f"params/{path}": leaves[path] for path in paths})
    arrays: dict[str, np.ndarray] = {}
    for target in targets:
        arrays |= target.arrays([fetched[f"params/{path}"].shards[0][1] for path in target.paths])
    stored = {}
    # The largest elements come first, so that every array is aligned in the file.
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):
        spec = _tree.strong_spec(array)
        stored[name] = Leaf(spec, spec, [(box_at(None, array.shape), array)])
    write_arrays(file, stored, _METADATA)


def _index(files: list[str], shards: list[list[Target]], leaves: Mapping[str, Any]) -> bytes:
    """Returns the content of an index."""
    weight_map = {
        name: os.path.basename(file)
        for file, shard in zip(files, shards, strict=True)
        for each in shard
        for name in each.names
    }
    total = sum(_nbytes(each, leaves) for shard in shards for each in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode()
