"""One state in one directory: save and load."""

import functools
import os
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from functrain.checkpoint import _leaves, _place, _together
from functrain.checkpoint._about import read_about, what
from functrain.checkpoint._background import Background
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._fingerprint import of_run
from functrain.checkpoint._lock import alone
from functrain.checkpoint._processes import all_or_none, are_several
from functrain.checkpoint._store import blanks, read_each
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
        leaves = _leaves.on_host(_leaves.by_path({STATE: state}))
        target = _place.local(path)
        _place.make_directory(os.path.dirname(target), "path")
    about = {"trees": [STATE], "run": of_run(state)}

    def write() -> None:
        with alone(os.path.dirname(target)):  # nobody else writes meanwhile
            _require_free(target, overwrite)
            _place.write_whole(target, leaves, about)

    background = Background()
    if are_several():
        end = _together.begin(target, leaves, lambda: _require_free(target, overwrite))
        background.start(lambda: end(about))
    else:
        background.start(write)
    background.wait()  # Orbax that Ctrl-C interrupts hangs for minutes: it is left to finish


def _require_free(target: str, overwrite: bool) -> None:
    """Refuses to take the place of something; undoes what an interrupted exchange left."""
    if overwrite:
        _place.take_back(target)
    if os.path.lexists(target) and not (overwrite and _place.is_checkpoint(target)):
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
    target, likes = _place.local(path), {STATE: like}
    while True:
        before = _place.identity(target)
        try:
            with all_or_none():  # Orbax reads together
                directory = _place.find(target)
                about = read_about(directory)
                _leaves.require_same(directory, about, likes)
            return read(directory, about, likes, ())[0][STATE]
        except (CheckpointCorruptError, CheckpointMismatchError):
            if are_several() or _place.identity(target) == before:
                raise  # else another process has replaced it meanwhile: that one is read


def read(
    directory: str, about: dict[str, Any], likes: dict[str, PyTree], beside: Iterable[str]
) -> tuple[dict[str, PyTree], dict[str, np.ndarray]]:
    """Reads trees into the structures of others, and arrays.

    At most some leaves are in memory twice. Of a leaf that several processes share, each reads its
    own part if the leaf was divided in the same way when it was saved.

    Args:
      directory: A checkpoint.
      about: What it says of itself.
      likes: By name in the file, of the same leaves; see `_leaves.require_same`.
      beside: Names of arrays to read beside the trees.

    Raises:
      CheckpointCorruptError: It is damaged.
    """
    leaves = _leaves.by_path(likes)
    blank = {name: functools.partial(_leaves.blank, like) for name, like in leaves.items()}
    digests = {name: about["leaves"][name].get("crc32") for name in leaves}
    own = {name: _leaves.own_places(like, digests[name]) for name, like in leaves.items()}

    def use(name: str, data: Any) -> Any:
        if name not in leaves:
            return data
        return _leaves.restored(_leaves.path_of(name), leaves[name], data)

    results = read_each(directory, about, {**blanks(about, beside), **blank}, use, own)
    values = [results.pop(name) for name in leaves]
    return jax.tree.unflatten(jax.tree.structure(likes), values), results
