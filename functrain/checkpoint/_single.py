"""One state in one directory: save and load."""

import os
from typing import Any

import jax

from functrain.checkpoint import _together
from functrain.checkpoint._about import read_about, what
from functrain.checkpoint._background import Background
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._fingerprint import of_run
from functrain.checkpoint._leaves import (
    Leaf,
    blank,
    by_path,
    on_host,
    path_of,
    require_same,
    restored,
    specs,
)
from functrain.checkpoint._place import (
    alone,
    find,
    identity,
    is_checkpoint,
    local,
    put,
    staged,
    take_back,
)
from functrain.checkpoint._processes import all_or_none, are_several
from functrain.checkpoint._store import read_arrays, write
from functrain.checkpoint._store import specs as specs_of
from functrain.common._types import PyTree

STATE = "state"


def save(path: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False) -> None:
    """Saves a state into a new directory; returns when it is written.

    The directory appears under its name only once it is whole. With `overwrite`, the new one is
    written beside the old one first; a kill in the moment of the exchange leaves the old one as
    ``<path>.functrain-old``, where `load` finds it. Through a symbolic link it is the directory
    behind it that is written or replaced. What Ctrl-C interrupts is finished all the same. To save
    a training now and then: `Checkpointer`. Several processes (`jax.distributed`) call it all, with
    a path that all of them see.

    Args:
      path: A local directory that does not exist yet. Missing parents are made.
      state: Any pytree of arrays (`jax.Array` of any dtype, typed keys `key[...]`, numpy arrays
        and scalars), a `TrainState` for one. None and empty containers are structure, not leaves.
      overwrite: Replace what an earlier `save` wrote at `path`.

    Raises:
      FileExistsError: `path` exists, and `overwrite` is False or it holds something else.
      TypeError: A leaf is no array.
      ValueError: An array was donated, two leaves have one path, or `path` is an address.

    Examples:
      >>> import jax, jax.numpy as jnp, tempfile
      >>> state = {"w": jnp.arange(3.0), "rng": jax.random.key(0)}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     save(f"{directory}/checkpoint", state)
      ...     print(load(f"{directory}/checkpoint", like=state)["w"])
      [0. 1. 2.]
    """
    with all_or_none():
        leaves = on_host(by_path(state, STATE))
        target = local(path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
    about = {"trees": [STATE], "run": of_run(state)}
    background = Background()
    if are_several():
        end = _together.begin(target, leaves, lambda: _require_free(target, overwrite))
        background.start(lambda: end(about))
    else:
        background.start(lambda: _write(target, leaves, about, overwrite))
    background.wait()  # Orbax that Ctrl-C interrupts hangs for minutes: it is left to finish


def _write(target: str, leaves: dict[str, Leaf], about: dict[str, Any], overwrite: bool) -> None:
    """Writes a checkpoint to its place, while nobody else does."""
    with alone(os.path.dirname(target)):
        _require_free(target, overwrite)
        write(staged(target), leaves, about)
        put(target)


def _require_free(target: str, overwrite: bool) -> None:
    """Refuses to take the place of something; undoes what an interrupted exchange left."""
    if overwrite:
        take_back(target)
    if os.path.lexists(target) and not (overwrite and is_checkpoint(target)):
        raise FileExistsError(
            f"{target}: expected no such path, got {what(target)}. Choose another path"
            + (", or remove it." if overwrite else ", or pass overwrite=True for a checkpoint.")
        )


def load(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Loads what `save` or a `Checkpointer` wrote, bit for bit, into the structure of `like`.

    Args:
      path: The directory: what `save` got, or that of one step of a `Checkpointer`.
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
      CheckpointMismatchError: What is there is no checkpoint, or its leaves are not those of
        `like`; the message names them, and nothing has been loaded. It is a ValueError.
      CheckpointCorruptError: What is there is damaged: every leaf is compared with its digest.

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
    target = local(path)
    while True:
        before = identity(target)
        try:
            with all_or_none():  # Orbax reads together
                directory = find(target)
                if directory is None:
                    raise FileNotFoundError(
                        f"{target}: expected a checkpoint, got nothing. Check the path."
                    )
                about = read_about(directory)
                leaves_to_read(directory, about, {STATE: like})
            return read_trees(directory, about, {STATE: like})[STATE]
        except (CheckpointCorruptError, CheckpointMismatchError):
            if are_several() or identity(target) == before:
                raise  # else another process has replaced it meanwhile: that one is read


def leaves_to_read(
    directory: str, about: dict[str, Any], likes: dict[str, PyTree]
) -> dict[str, Any]:
    """Returns the leaves of trees by name, which are those of a checkpoint.

    Raises:
      CheckpointMismatchError: They are not; nothing was read.
    """
    leaves = {n: x for root, like in likes.items() for n, x in by_path(like, root).items()}
    saved = {n: spec for n, spec in specs_of(about).items() if n.partition("/")[0] in likes}
    require_same(directory, specs(leaves), saved)
    return leaves


def read_trees(
    directory: str, about: dict[str, Any], likes: dict[str, PyTree]
) -> dict[str, PyTree]:
    """Reads trees into the structures of others.

    Args:
      directory: A checkpoint.
      about: What it says of itself.
      likes: By name in the file.

    Raises:
      CheckpointMismatchError: Its leaves are not those of the trees.
      CheckpointCorruptError: It is damaged.
    """
    leaves = leaves_to_read(directory, about, likes)
    arrays = read_arrays(directory, about, {name: blank(x) for name, x in leaves.items()})
    # Leaf by leaf, so that at the most one of them is in memory twice.
    found = {name: restored(path_of(name), like, arrays.pop(name)) for name, like in leaves.items()}
    return {
        root: jax.tree.unflatten(
            jax.tree.structure(like), [found[name] for name in by_path(like, root)]
        )
        for root, like in likes.items()
    }
