"""Arrays, for whatever reads safetensors."""

import os

import jax
import numpy as np

from functrain.checkpoint._leaves import fetch_leaves, leaf_path, named_leaves
from functrain.checkpoint._warm_start import import_safetensors
from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.export._whole import require_free, written


def params(path: str | os.PathLike[str], params: PyTree, *, overwrite: bool = False) -> None:
    """Writes arrays into a safetensors file, each under its path.

    `functrain.warm_start` reads it back, and so does everything that reads such files:
    ``safetensors.numpy.load_file(path)`` returns a dict by path, ``dense/kernel``. Bits and dtypes
    are kept. There is no structure in the file, and nothing in it can run code.

    Args:
      path: A file `.safetensors`. Missing folders are made.
      params: Any pytree of arrays: ``state.params``; or a dict of parts of a state.
      overwrite: Replace a file.

    Raises:
      FileExistsError: There is a file, and `overwrite` is False.
      ImportError: safetensors is not installed.
      TypeError: A leaf is no array of numbers, or of a dtype that such files do not have.
      ValueError: `path` has another suffix, or there are no arrays.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, safetensors.numpy, tempfile
      >>> params = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ft.export.params(f"{folder}/params.safetensors", params)
      ...     found = safetensors.numpy.load_file(f"{folder}/params.safetensors")
      ...     warm = ft.warm_start(params, f"{folder}/params.safetensors")
      >>> sorted(found), len(warm.taken)
      (['dense/bias', 'dense/kernel'], 2)
    """
    library = import_safetensors()
    if not isinstance(path, str | os.PathLike):
        raise TypeError("the order is functrain.export.params(path, params), got no path first")
    if not os.fspath(path).endswith(".safetensors"):
        raise ValueError(f"path: expected a name that ends in .safetensors, got {path}")
    require_free(path, overwrite=overwrite)
    leaves = named_leaves({"params": params})
    if not leaves:
        raise ValueError("params: expected arrays, got none.")
    for name, leaf in leaves.items():
        if _tree.is_key(leaf):
            raise TypeError(
                f"{leaf_path(name)}: expected an array of numbers, got {_tree.spec(leaf)}. Such "
                "files know no keys: export state.params, or a dict of parts without rng."
            )
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"expected to export from one process, got {jax.process_count()}, of which none has "
            "all. Save with functrain.save, and export from one process that loads it."
        )
    # The library takes memory as it lies, so it has to lie in order.
    arrays = {
        leaf_path(n): np.require(x.shards[0][1], requirements="C")
        for n, x in fetch_leaves(leaves).items()
    }
    with written(path) as file:
        try:
            library.numpy.save_file(arrays, file)
        except library.SafetensorError as error:
            dtypes = sorted({str(x.dtype) for x in arrays.values()})
            raise TypeError(
                f"params: expected dtypes that safetensors has, got {', '.join(dtypes)}: {error}"
            ) from error
