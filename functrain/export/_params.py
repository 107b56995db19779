"""Arrays, for programs that read safetensors."""

import os

import jax

from functrain.checkpoint._arrays import DTYPES, write_arrays
from functrain.checkpoint._leaves import fetch_leaves, leaf_path, named_leaves
from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.export._atomic import atomic_write, require_free


def params(path: str | os.PathLike[str], params: PyTree, *, overwrite: bool = False) -> None:
    """Writes arrays to a safetensors file, each under its path.

    `functrain.warm_start` reads it back, and so does any program that reads such files:
    ``safetensors.numpy.load_file(path)`` returns a dict by path, ``dense/kernel``. Bits and dtypes
    are kept. The file has no structure, and nothing in it can run code.

    Args:
      path: A file `.safetensors`. Missing folders are created.
      params: Any pytree of arrays: ``state.params``; or a dict of parts of a state.
      overwrite: True replaces an existing file.

    Raises:
      FileExistsError: The file exists, and `overwrite` is False.
      OSError: The file cannot be written.
      TypeError: A leaf is not an array of numbers, or of a dtype that such files do not have.
      ValueError: `path` has another suffix, or there are no arrays.

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
    has_suffix = os.fspath(path).endswith(".safetensors")
    require(has_suffix, "path", "a name that ends in .safetensors", os.fspath(path))
    leaves = named_leaves({"params": params})
    require(leaves, "params", "a pytree with arrays", params)
    # An array that is spread over processes cannot be fetched by one of them.
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"expected to export from one process, got {jax.process_count()}. Save with "
            "functrain.save, and export from one process that loads it."
        )
    fetched = {}
    for name, leaf in fetch_leaves(leaves).items():
        path_of_leaf, dtype = leaf_path(name), leaf.shards[0][1].dtype
        is_number = not _tree.is_key(leaves[name]) and str(dtype) in DTYPES.values()
        expected, advice = "an array of a dtype that safetensors has", "Convert or omit the array."
        require(is_number, path_of_leaf, expected, leaves[name], advice, error=TypeError)
        fetched[path_of_leaf] = leaf
    # The largest elements come first, so that every array is aligned in the file.
    in_order = sorted(fetched.items(), key=lambda item: -item[1].shards[0][1].itemsize)
    with atomic_write(target) as file:
        write_arrays(file, dict(in_order))
