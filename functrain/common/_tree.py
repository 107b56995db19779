"""Pytrees: paths and specs for error messages, and copies that nothing else can see."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common._types import PyTree
from functrain.common._wide_integers import require_fits


def path_str(path: tuple[jax.tree_util.KeyEntry, ...]) -> str:
    """Returns a path as ``params/dense/kernel``; the root is ``(root)``."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(root)"


def keys(path: tuple[jax.tree_util.KeyEntry, ...]) -> tuple[str, ...]:
    """Returns a path as a tuple of strings."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def leaves_with_path(tree: PyTree) -> Iterator[tuple[str, PyTree]]:
    """Yields every leaf with its path as a string."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield path_str(path), leaf


def nodes(tree: PyTree, *kinds: type) -> list[Any]:
    """Returns the nodes of a tree that are of some classes, whole."""
    found = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in found if isinstance(x, kinds)]


def select(which: jax.Array, there: PyTree, otherwise: PyTree) -> PyTree:
    """Returns one of two trees of the same leaves, with the bits it has alone.

    By `cond`: `where` would become part of the sums before it, and round them otherwise.
    """
    return jax.lax.cond(which, lambda a, b: a, lambda a, b: b, there, otherwise)


def at_least_float32(x: Any) -> jax.Array:
    """Returns an array of numbers in float32 or wider, also where promotion is strict."""
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.asarray(x, dtype)


def structure(tree: PyTree) -> Any:
    """Returns the treedef; jax gives its type no operators."""
    return jax.tree.structure(tree)


def is_array(x: PyTree) -> bool:
    """Whether a leaf has a shape and a dtype, abstract ones too."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def spec(x: PyTree) -> str:
    """Returns a leaf's dtype and shape as ``float32[8, 3]``, or its type if it is no array."""
    return strong_spec(x) + ", weak type" * bool(getattr(x, "weak_type", False))


def strong_spec(x: PyTree) -> str:
    """As `spec`, whether or not the type is weak."""
    if not is_array(x):
        return type(x).__name__
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


def differences(expected: PyTree, got: PyTree) -> list[str]:
    """Names what tells two trees apart: leaves missing, unexpected, or of another spec."""
    want, have = (
        {path: spec(leaf) for path, leaf in leaves_with_path(tree)} for tree in (expected, got)
    )
    lines = spec_differences(want, have)
    if not lines and structure(expected) != structure(got):
        lines = [f"expected {structure(expected)}, got {structure(got)}"]
    return lines


def spec_differences(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """As `differences`, of specs by path."""
    lines = [f"{p}: missing (expected {expected[p]})" for p in expected if p not in got]
    lines += [f"{p}: unexpected (got {got[p]})" for p in got if p not in expected]
    other = {p: x for p, x in got.items() if expected.get(p, x) != x}
    return lines + [f"{p}: expected {expected[p]}, got {other[p]}" for p in expected if p in other]


def bullets(lines: list[str], most: int = 12) -> str:
    """Formats lines as an indented list, cut short where it is long."""
    shown = [f"  {line}" for line in lines[:most]]
    if len(lines) > most:
        shown.append(f"  ... and {len(lines) - most} more")
    return "\n".join(shown)


def format_leaves(tree: PyTree, which: Callable[[Any], Any] = lambda leaf: True) -> str:
    """Formats the leaves of some kind as `bullets`, paths and specs; "" where there is none."""
    return bullets([f"{path}: {spec(x)}" for path, x in leaves_with_path(tree) if which(x)])


def is_key(x: PyTree) -> bool:
    """Whether a leaf is a typed PRNG key (array)."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def shapes(tree: PyTree) -> PyTree:
    """Returns what the arrays of a tree look like to a step: their shapes and dtypes in jax."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype if is_key(x) else x.dtype.newbyteorder("=")
        dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(x.shape, dtype)

    return jax.tree.map(shape, tree)


def copy(tree: PyTree) -> PyTree:
    """Returns the tree with every leaf in a buffer of its own, strongly typed.

    What a program may donate must not be referred to elsewhere, and a weak type that a step makes
    strong would compile everything twice. Shardings are kept.

    Raises:
      TypeError: A leaf is neither an array nor a Python number; the message names it.
      ValueError: An array was donated to a program, or holds integers that jax would cut to 32
        bits.
    """
    return jax.tree_util.tree_map_with_path(_copy, tree)


def copy_if_needed(tree: PyTree) -> PyTree:
    """As `copy`, but takes over the jax arrays that it can: those that are no other leaf's too."""
    shared = {path for _, path in aliases(tree)}

    def take(path: tuple[jax.tree_util.KeyEntry, ...], leaf: PyTree) -> jax.Array:
        is_weak = getattr(leaf, "weak_type", False)  # keys have none
        as_it_is = isinstance(leaf, jax.Array) and not is_weak and not is_deleted(leaf)
        return leaf if as_it_is and path_str(path) not in shared else _copy(path, leaf)

    return jax.tree_util.tree_map_with_path(take, tree)


def device_put(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts an array, or a PRNG key, where a sharding says: on other processes' devices too.

    `jax.device_put` takes every other dtype there, and refuses keys with a ValueError (jax 0.12.0).
    The numbers that a key consists of are more axes behind its own, which no sharding divides.
    """
    if is_key(x) and not sharding.is_fully_addressable:
        key_data = jax.device_put(jax.random.key_data(x), sharding)
        array: jax.Array = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(x))
    else:
        array = jax.device_put(x, sharding)
    return array


def device_put_like(x: Any, other: jax.Array) -> jax.Array:
    """Puts an array where another is, and nowhere in particular where the other is not.

    A device that was chosen is part of what a program is compiled for: one such leaf in a state,
    and all programs would be compiled again.
    """
    return device_put(x, other.sharding) if other.committed else jnp.asarray(x)


def _copy(path: tuple[jax.tree_util.KeyEntry, ...], leaf: PyTree) -> jax.Array:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(
            f"expected an array at {path_str(path)}, got {spec(leaf)}. A state holds arrays "
            "only: keep functions and settings in the step that closes over them."
        )
    if is_deleted(leaf):
        raise ValueError(
            f"expected a live array at {path_str(path)}, got {spec(leaf)} that a program took "
            "over (donation). Take the state that the program returned."
        )
    if isinstance(leaf, jax.Array) and is_key(leaf):
        return jnp.copy(leaf)
    require_fits(leaf, "expected", f" at {path_str(path)}")
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jnp.array(leaf, dtype=jax.dtypes.canonicalize_dtype(dtype))


def is_concrete(x: PyTree) -> bool:
    """Whether a leaf is a jax array with a value, which may be gone or elsewhere: no tracer."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def is_deleted(x: PyTree) -> bool:
    """Whether a leaf is an array whose buffer is gone."""
    return is_concrete(x) and x.is_deleted()


def is_readable(x: PyTree) -> bool:
    """Whether a leaf is an array whose value this process can read."""
    return is_concrete(x) and not x.is_deleted() and x.is_fully_addressable


def aliases(tree: PyTree) -> list[tuple[str, str]]:
    """Returns the pairs of paths whose leaves share one buffer on a device."""
    first: dict[object, str] = {}
    pairs = []
    for path, leaf in leaves_with_path(tree):
        if not is_concrete(leaf) or leaf.is_deleted():
            continue
        key: object = id(leaf)
        if not is_key(leaf) and leaf.size and leaf.sharding.addressable_devices:
            # Not `addressable_shards`: cached, it makes an array on one device refer to itself.
            shard = leaf.addressable_data(0)
            key = shard.device, shard.unsafe_buffer_pointer()
        if key in first:
            pairs.append((first[key], path))
        else:
            first[key] = path
    return pairs


def require_scalars(values: PyTree) -> None:
    """Refuses metrics whose values are no scalars."""
    if wrong := format_leaves(values, jnp.shape):
        raise TypeError(
            "metrics: expected a scalar, f32[], from each metric's compute, or a dict of them, got"
            f"\n{wrong}\nReduce it there, or return its elements under names of their own."
        )
