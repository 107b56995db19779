"""The leaves of a state as a file knows them: by path, with a spec, as plain arrays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree


def by_path(tree: PyTree) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, leaf in _tree.leaves_with_path(tree):
        if name in leaves:
            raise ValueError(
                f"{name}: expected one leaf of this path, got two. Rename a key that has '/' in it."
            )
        leaves[name] = leaf
    return leaves


def data(name: str, leaf: Any) -> jax.Array | np.ndarray[Any, Any]:
    """The plain array that stands for a leaf in the file."""
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"{name}: expected a live array, got {_tree.strong_spec(leaf)} that was donated to "
                "a program. Save the state that the step returned, not the one it was given."
            )
        return jax.random.key_data(leaf) if _tree.is_key(leaf) else leaf
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm":
        return np.asarray(leaf)
    raise TypeError(
        f"{name}: expected an array of numbers, got {_tree.spec(leaf)}. Make it one with "
        "jnp.asarray, or keep it out of the state."
    )


def check(directory: str, expected: dict[str, str], got: dict[str, str]) -> None:
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


def target_of(leaf: Any) -> Any:
    """What Orbax is asked for: an array in its place, or host memory."""
    if _tree.is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
    else:
        data = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    sharding = _sharding(leaf)
    if sharding is None:
        return np.empty(data.shape, data.dtype)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def restore(name: str, leaf: Any, data: Any) -> Any:
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
