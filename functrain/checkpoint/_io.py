"""One state in one directory, written by Orbax.

The leaves are stored flat, under the paths that error messages use, beside a list of their specs.
So loading can compare specs first (Orbax itself casts and leaves leaves unfilled in silence), and
no container type needs to be known to the file.
"""

import os

import jax
import numpy as np

from functrain.checkpoint._leaves import by_path, check, data, restore, target_of
from functrain.checkpoint._place import exchange, find, saved_specs, staged, take_back, what
from functrain.common import _tree
from functrain.common._types import PyTree


def save(path: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False) -> None:
    """Saves a state into a new directory; returns when it is written.

    The directory appears under its name only once it is whole. With `overwrite`, the new one is
    written beside the old one first; a kill in the moment of the exchange leaves the old one as
    ``<path>.functrain-old``, where `load` finds it. Through a symbolic link it is the directory
    behind it that is written or replaced.

    Args:
      path: A local directory that does not exist yet. Missing parents are made.
      state: Any pytree of arrays (`jax.Array` of any dtype, typed keys `key[...]`, numpy arrays
        and scalars), a `TrainState` for one. None and empty containers are structure, not leaves.
      overwrite: Replace what an earlier `save` wrote at `path`.

    Raises:
      FileExistsError: `path` exists, and `overwrite` is False or it holds something else.
      TypeError: A leaf is no array.
      ValueError: An array was donated, or two leaves have one path.

    Examples:
      >>> import jax, jax.numpy as jnp, tempfile
      >>> state = {"w": jnp.arange(3.0), "rng": jax.random.key(0)}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/checkpoint", state)
      ...     print(load(f"{directory}/checkpoint", like=state)["w"])
      [0. 1. 2.]
    """
    from orbax.checkpoint import v1 as ocp

    leaves = by_path(state)
    arrays = {name: data(name, leaf) for name, leaf in leaves.items()}
    specs = {name: _tree.strong_spec(leaf) for name, leaf in leaves.items()}
    target = os.path.realpath(path)
    if overwrite:
        take_back(target)
    replace = os.path.lexists(target)
    if replace and not (overwrite and saved_specs(target) is not None):
        raise FileExistsError(
            f"{target}: expected no such path, got {what(target)}. Choose another path"
            + (", or remove it." if overwrite else ", or pass overwrite=True for a checkpoint.")
        )
    # Orbax rejects arrays of size zero and trees without leaves; the specs say all of the former.
    stored = {name: array for name, array in arrays.items() if array.size}
    ocp.save(
        staged(target) if replace else target,
        stored or {"(empty)": np.zeros(1)},
        custom_metadata={"functrain": {"leaves": specs}},
        overwrite=replace,
    )
    if replace:
        exchange(target)  # Orbax's own overwrite deletes first, and a kill then would leave nothing


def load(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Loads what `save` wrote, bit for bit, into the structure of `like`.

    Args:
      path: The directory.
      like: A state of the structure, shapes and dtypes that were saved; its values are not used.
        Either a concrete one, or an abstract one, which costs no memory:
        ``jax.eval_shape(lambda: TrainState.create(...))``.

    A save that was killed in the moment it replaced another is not missed: the one before it is
    loaded, with a warning. So a run goes on, or begins, without a look at what is there::

        with contextlib.suppress(FileNotFoundError):
            state = ft.load(path, like=state)

    Returns:
      The state: the treedef of `like`, arrays strongly typed, numpy where `like` is numpy. An
      array gets the sharding of its leaf in `like`, or the default device where that leaf is
      abstract without a sharding, or not committed to a device.

    Raises:
      FileNotFoundError: Nothing is at `path`, and nothing was kept beside it.
      ValueError: What is there is no checkpoint, or its leaves are not those of `like`; the
        message names them, and nothing has been loaded.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, tempfile
      >>> from functrain import TrainState
      >>> def create():
      ...     return TrainState.create(params={"w": jnp.ones(3)}, tx=optax.adam(1e-3))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/checkpoint", create())
      ...     state = load(f"{directory}/checkpoint", like=jax.eval_shape(create))
      >>> print(state.step, state.params["w"])
      0 [1. 1. 1.]
    """
    from orbax.checkpoint import v1 as ocp

    target = os.path.realpath(path)
    directory = find(target)
    if directory is None:
        raise FileNotFoundError(f"{target}: expected a checkpoint, got nothing. Check the path.")
    specs = saved_specs(directory)
    if specs is None:
        raise ValueError(
            f"{directory}: expected a checkpoint, got {what(directory)}. Load what "
            "functrain.save wrote."
        )
    leaves = by_path(like)
    check(directory, {name: _tree.strong_spec(leaf) for name, leaf in leaves.items()}, specs)
    targets = {name: target_of(leaf) for name, leaf in leaves.items()}
    stored = {name: target for name, target in targets.items() if np.prod(target.shape)}
    arrays = ocp.load(directory, stored) if stored else {}
    restored = [
        restore(name, leaf, arrays.get(name, targets[name])) for name, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), restored)
