"""One state in one directory, written by Orbax.

The leaves are stored flat, under the paths that error messages use, beside a list of their specs.
So loading can compare specs first (Orbax itself casts and leaves leaves unfilled in silence), and
no container type needs to be known to the file.
"""

import os
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree

_NEW, _OLD = ".functrain-new", ".functrain-old"


def save(path: str | os.PathLike[str], state: PyTree, *, overwrite: bool = False) -> None:
    """Saves a state into a new directory; returns when it is written.

    The directory appears under its name only once it is whole. With `overwrite`, the new one is
    written beside the old one first; a kill in the moment of the exchange leaves the old one as
    ``<path>.functrain-old``.

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

    leaves = _by_path(state)
    arrays = {name: _data(name, leaf) for name, leaf in leaves.items()}
    specs = {name: _spec(leaf) for name, leaf in leaves.items()}
    target = os.path.abspath(path)
    replace = os.path.lexists(target)
    if replace and not (overwrite and _saved_specs(target) is not None):
        raise FileExistsError(
            f"{target}: expected no such path, got {_what(target)}. Choose another path"
            + (", or remove it." if overwrite else ", or pass overwrite=True for a checkpoint.")
        )
    # Orbax rejects arrays of size zero and trees without leaves; the specs say all of the former.
    stored = {name: array for name, array in arrays.items() if array.size}
    ocp.save(
        target + _NEW if replace else target,
        stored or {"(empty)": np.zeros(1)},
        custom_metadata={"functrain": {"leaves": specs}},
        overwrite=replace,
    )
    if replace:
        # Orbax's own overwrite deletes first, and a kill then would leave nothing.
        shutil.rmtree(target + _OLD, ignore_errors=True)
        os.rename(target, target + _OLD)
        os.rename(target + _NEW, target)
        shutil.rmtree(target + _OLD)


def load(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Loads what `save` wrote, bit for bit, into the structure of `like`.

    Args:
      path: The directory.
      like: A state of the structure, shapes and dtypes that were saved; its values are not used.
        Either a concrete one, or an abstract one, which costs no memory:
        ``jax.eval_shape(lambda: TrainState.create(...))``.

    Returns:
      The state: the treedef of `like`, arrays strongly typed, numpy where `like` is numpy. An
      array gets the sharding of its leaf in `like`, or the default device where that leaf is
      abstract without a sharding, or not committed to a device.

    Raises:
      FileNotFoundError: Nothing is at `path`.
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

    directory = os.path.abspath(path)
    if not os.path.lexists(directory):
        kept = f"{directory}{_OLD}"
        hint = f" An interrupted save kept {kept}." if os.path.lexists(kept) else " Check the path."
        raise FileNotFoundError(f"{directory}: expected a checkpoint, got nothing.{hint}")
    specs = _saved_specs(directory)
    if specs is None:
        raise ValueError(
            f"{directory}: expected a checkpoint, got {_what(directory)}. Load what "
            "functrain.save wrote."
        )
    leaves = _by_path(like)
    _check(directory, {name: _spec(leaf) for name, leaf in leaves.items()}, specs)
    targets = {name: _target(leaf) for name, leaf in leaves.items()}
    stored = {name: target for name, target in targets.items() if np.prod(target.shape)}
    arrays = ocp.load(directory, stored) if stored else {}
    restored = [
        _restore(name, leaf, arrays.get(name, targets[name])) for name, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def _by_path(tree: PyTree) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, leaf in _tree.leaves_with_path(tree):
        if name in leaves:
            raise ValueError(
                f"{name}: expected one leaf of this path, got two. Rename a key that has '/' in it."
            )
        leaves[name] = leaf
    return leaves


def _data(name: str, leaf: Any) -> jax.Array | np.ndarray[Any, Any]:
    """The plain array that stands for a leaf in the file."""
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"{name}: expected a live array, got {_spec(leaf)} that was donated to a program. "
                "Save the state that the step returned, not the one it was given."
            )
        return jax.random.key_data(leaf) if _tree.is_key(leaf) else leaf
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm":
        return np.asarray(leaf)
    raise TypeError(
        f"{name}: expected an array of numbers, got {_tree.spec(leaf)}. Make it one with "
        "jnp.asarray, or keep it out of the state."
    )


def _spec(leaf: Any) -> str:
    """``float32[8, 3]``, without the weak type, which is not kept."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _saved_specs(directory: str) -> dict[str, str] | None:
    """The specs in the file, or None if `save` did not write it."""
    from orbax.checkpoint import v1 as ocp

    try:
        metadata = ocp.metadata(directory).custom_metadata
    except (ocp.errors.InvalidLayoutError, OSError):
        return None
    specs: dict[str, str] | None = (metadata or {}).get("functrain", {}).get("leaves")
    return specs


def _what(path: str) -> str:
    if not os.path.isdir(path):
        return "a file"
    return "something else" if _saved_specs(path) is None else "a checkpoint"


def _check(directory: str, expected: dict[str, str], got: dict[str, str]) -> None:
    lines = _tree.spec_differences(expected, got)
    if lines:
        raise ValueError(
            f"{directory}: expected the leaves of `like`, got others:\n{_tree.bullets(lines)}\n"
            "Nothing was loaded. Build `like` with the model, the optimizer and the rng (or "
            "rng=None) that were saved."
        )


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Where a restored leaf is put; None lets it move freely, as a fresh array does."""
    return getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None


def _target(leaf: Any) -> Any:
    """What Orbax is asked for: an array in its place, or host memory."""
    if _tree.is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
    else:
        data = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    sharding = _sharding(leaf)
    if sharding is None:
        return np.empty(data.shape, data.dtype)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _restore(name: str, leaf: Any, data: Any) -> Any:
    """Makes a leaf like `leaf` of what was read, or of a target where nothing was stored."""
    if isinstance(leaf, np.ndarray | np.generic):
        return data if isinstance(leaf, np.ndarray) else data[()]
    if isinstance(data, jax.ShapeDtypeStruct):
        data = np.zeros(data.shape, data.dtype)  # size zero
    sharding = _sharding(leaf)
    array = jnp.array(data) if sharding is None else jax.device_put(data, sharding)
    if array.dtype != data.dtype:
        raise ValueError(
            f"{name}: expected {data.dtype}, which jax cannot hold now, got {array.dtype}. "
            "Set jax.config.update('jax_enable_x64', True) before loading."
        )
    if not _tree.is_key(leaf):
        return array
    impl: list[Any] = []  # key_impl takes no abstract key from outside, but a traced one
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(array, impl=impl[0])
