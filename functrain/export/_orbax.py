"""Checkpoints of Orbax."""

import os
import shutil

from functrain.checkpoint._orbax import METADATA
from functrain.checkpoint._processes import main_group
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
      overwrite: True replaces an existing checkpoint of Orbax, once the new one is written.

    Raises:
      FileExistsError: `path` exists, and `overwrite` is False or it holds something else.
      ImportError: orbax-checkpoint is not installed.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, orbax.checkpoint, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ft.export.orbax(f"{folder}/params", {"kernel": jnp.ones(2)})
      ...     tree = orbax.checkpoint.StandardCheckpointer().restore(f"{folder}/params")
      >>> tree["kernel"].tolist()
      [1.0, 1.0]
    """
    advice = "The path comes first: export.orbax(path, tree)."
    target = os.path.realpath(absolute_path(path, advice=advice))
    to_install = "Orbax checkpoints need the library: pip install 'functrain[orbax]'"
    library = import_optional("orbax.checkpoint", to_install)
    is_there, is_replaceable = main_group.call_on_first(
        lambda: [os.path.exists(target), _is_replaceable(target)]
    )
    if is_there and not (overwrite and is_replaceable):
        raise FileExistsError(
            f"{target}: expected no such path, or an Orbax checkpoint and overwrite=True, got an "
            "existing one. Choose another path."
        )
    new = f"{target}.functrain-new" if is_there else target
    with library.StandardCheckpointer() as checkpointer:
        checkpointer.save(new, tree, force=is_there)
    if is_there:
        main_group.call_on_first(lambda: _replace(target, new))


def _is_replaceable(path: str) -> bool:
    """Returns True for a checkpoint of Orbax, and for an empty directory."""
    if not os.path.isdir(path):
        return False
    names = os.listdir(path)
    return not names or METADATA in names


def _replace(target: str, new: str) -> None:
    """Gives a directory the name of another one, which is removed."""
    old = f"{target}.functrain-old"
    shutil.rmtree(old, ignore_errors=True)
    os.rename(target, old)
    os.rename(new, target)
    shutil.rmtree(old)
