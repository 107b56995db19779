"""Arrays, for programs that read safetensors."""

import os

import jax
import numpy as np

from functrain.checkpoint._array_files import import_safetensors
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
      ImportError: safetensors is not installed.
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
    library = import_safetensors()
    if not isinstance(path, str | os.PathLike):
        raise TypeError("the order is functrain.export.params(path, params), got no path first")
    has_suffix = os.fspath(path).endswith(".safetensors")
    require(has_suffix, "path", "a name that ends in .safetensors", os.fspath(path))
    require_free(path, overwrite=overwrite)
    leaves = named_leaves({"params": params})
    require(leaves, "params", "a pytree with arrays", params)
    for name, leaf in leaves.items():
        advice = "safetensors has no keys: export state.params, or a dict of parts without rng."
        is_number = not _tree.is_key(leaf)
        require(is_number, leaf_path(name), "an array of numbers", leaf, advice, error=TypeError)
    # An array that is spread over processes cannot be fetched by one of them.
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"expected to export from one process, got {jax.process_count()}, none of which has "
            "all arrays. Save with functrain.save, and export from one process that loads it."
        )
    arrays = {}
    for name, fetched in fetch_leaves(leaves).items():
        # The library writes memory as it is, whatever the strides of the array.
        arrays[leaf_path(name)] = np.require(fetched.shards[0][1], requirements="C")
    with atomic_write(path) as file:
        try:
            library.numpy.save_file(arrays, file)
        except library.SafetensorError as error:
            dtypes = sorted({str(x.dtype) for x in arrays.values()})
            raise TypeError(
                f"params: expected dtypes that safetensors has, got {', '.join(dtypes)}: {error}. "
                "Convert the arrays first."
            ) from error
