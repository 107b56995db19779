"""Checkpoints of Orbax."""

import os

from functrain.common._library import import_optional
from functrain.common._paths import absolute_path
from functrain.common._types import PyTree


def orbax(path: str | os.PathLike[str], tree: PyTree, *, overwrite: bool = False) -> None:
    """Writes a pytree as a checkpoint of Orbax, with `orbax.checkpoint.StandardCheckpointer`.

    Other programs read it with Orbax alone, and `functrain.warm_start` reads it back. For runs that
    are resumed use `functrain.Checkpointer`. In several processes, all of them call it.

    Args:
      path: A directory. Missing folders are created.
      tree: Any pytree of arrays, such as a state or its params. Attributes become keys.
      overwrite: True replaces an existing checkpoint.

    Raises:
      FileExistsError: Something is at the path, and `overwrite` is False.
      ImportError: orbax-checkpoint is not installed.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, orbax.checkpoint, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ft.export.orbax(f"{folder}/params", {"kernel": jnp.ones(2)})
      ...     tree = orbax.checkpoint.StandardCheckpointer().restore(f"{folder}/params")
      >>> tree["kernel"].tolist()
      [1.0, 1.0]
    """
    target = absolute_path(path, advice="The path comes first: export.orbax(path, tree).")
    to_install = "Orbax checkpoints need the library: pip install 'functrain[orbax]'"
    library = import_optional("orbax.checkpoint", to_install)
    if os.path.lexists(target) and not overwrite:
        raise FileExistsError(
            f"{target}: expected no such directory, got one. Choose another path, or pass "
            "overwrite=True."
        )
    with library.StandardCheckpointer() as checkpointer:
        checkpointer.save(target, tree, force=overwrite)
