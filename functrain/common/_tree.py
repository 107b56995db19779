"""Pytrees: paths and specs of leaves for error messages, and copies of states."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common._types import PyTree
from functrain.common._wide_integers import require_integers_fit


def path_str(path: tuple[jax.tree_util.KeyEntry, ...]) -> str:
    """Returns a path as text, such as ``params/dense/kernel``; the root is ``(root)``."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "(root)"


def keys(path: tuple[jax.tree_util.KeyEntry, ...]) -> tuple[str, ...]:
    """Returns a path as a tuple of strings."""
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def leaves_with_path(
    tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None
) -> Iterator[tuple[str, PyTree]]:
    """Yields every leaf with its path as a string.

    Args:
      tree: A pytree.
      is_leaf: As in jax: a node for which it returns True is a leaf.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        yield path_str(path), leaf


def nodes(tree: PyTree, *kinds: type) -> list[Any]:
    """Returns the outermost nodes of a tree that are instances of the given classes."""
    outermost = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in outermost if isinstance(x, kinds)]


def select(condition: jax.Array, if_true: PyTree, if_false: PyTree) -> PyTree:
    """Returns one of two trees of the same leaves, bit for bit."""
    # Not `jnp.where`: XLA fuses it with the sums before it, which then round differently.
    return jax.lax.cond(condition, lambda a, b: a, lambda a, b: b, if_true, if_false)


def at_least_float32(x: Any) -> jax.Array:
    """Returns an array of numbers in float32 or a wider dtype."""
    # Under strict promotion, which a user may have set, jax would refuse to promote the dtypes.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.asarray(x, dtype)


def structure(tree: PyTree) -> Any:
    """Returns the treedef, as Any: jax's own type declares no `==` to type checkers."""
    return jax.tree.structure(tree)


def is_array(x: PyTree) -> bool:
    """Returns True if a leaf has a shape and a dtype; an abstract array does."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def spec(x: PyTree) -> str:
    """Returns the dtype and shape of an array as ``float32[8, 3]``, or the type of another leaf."""
    is_weak = getattr(x, "weak_type", False)
    return f"{strong_spec(x)}, weak type" if is_weak else strong_spec(x)


def strong_spec(x: PyTree) -> str:
    """Returns the `spec` of a leaf without a mention of weak types."""
    if not is_array(x):
        return type(x).__name__
    return format_spec(x.dtype, x.shape)


def format_spec(dtype: Any, shape: Iterable[Any]) -> str:
    """Returns a dtype and a shape as text.

    Examples:
      >>> format_spec("float32", (8, 3))
      'float32[8, 3]'
    """
    return f"{dtype}[{', '.join(map(str, shape))}]"


def signature(tree: PyTree) -> Any:
    """Returns the structure, shapes and dtypes of a tree, hashable."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)


def differences(expected: PyTree, got: PyTree) -> list[str]:
    """Returns a line for each leaf that is missing, unexpected, or has another spec."""
    lines = spec_differences(_specs(expected), _specs(got))
    # The same paths may come from other containers, such as a list in place of a tuple.
    if not lines and structure(expected) != structure(got):
        lines = [f"expected {structure(expected)}, got {structure(got)}"]
    return lines


def _specs(tree: PyTree) -> dict[str, str]:
    """Returns the specs of the leaves by path; weak types count as any other."""
    return {path: strong_spec(leaf) for path, leaf in leaves_with_path(tree)}


def spec_differences(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Returns the lines of `differences` for specs by path."""
    missing, changed = [], []
    for path, want in expected.items():
        if path not in got:
            missing.append(f"{path}: missing (expected {want})")
        elif got[path] != want:
            changed.append(f"{path}: expected {want}, got {got[path]}")
    unexpected = [f"{path}: unexpected (got {got[path]})" for path in got if path not in expected]
    return missing + unexpected + changed


def bullets(lines: list[str]) -> str:
    """Formats lines as an indented list, of at most twelve."""
    items = [f"  {line}" for line in lines[:12]]
    if len(lines) > 12:
        items.append(f"  ... and {len(lines) - 12} more")
    return "\n".join(items)


def format_leaves(tree: PyTree, condition: Callable[[Any], Any] = lambda leaf: True) -> str:
    """Formats the paths and specs of the leaves that meet a condition; "" if there are none."""
    return bullets([f"{path}: {spec(x)}" for path, x in leaves_with_path(tree) if condition(x)])


def is_key(x: PyTree) -> bool:
    """Returns True if a leaf is an array of typed PRNG keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def shapes(tree: PyTree) -> PyTree:
    """Returns the arrays of a tree as `jax.ShapeDtypeStruct`, with the dtypes they have in jax."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype if is_key(x) else x.dtype.newbyteorder("=")
        dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(x.shape, dtype)

    return jax.tree.map(shape, tree)


def copy(tree: PyTree) -> PyTree:
    """Returns the tree with every leaf copied to a new buffer, strongly typed.

    Programs may donate the buffers of a state, so nothing else may refer to them. Weak types would
    compile everything twice: once before and once after the step that makes them strong. Shardings
    are kept.

    Raises:
      TypeError: A leaf is neither an array nor a Python number; the message names it.
      ValueError: An array was donated to a program, or holds integers that jax would truncate to
        32 bits.
    """
    return jax.tree_util.tree_map_with_path(_copy, tree)


def copy_if_needed(tree: PyTree) -> PyTree:
    """Returns the tree like `copy`, but reuses strongly typed arrays of jax that no leaf shares."""
    shared_paths = {path for _, path in aliases(tree)}

    def copy_or_reuse(path: tuple[jax.tree_util.KeyEntry, ...], leaf: PyTree) -> jax.Array:
        # Arrays of PRNG keys have no `weak_type`.
        is_shared = bool(shared_paths) and path_str(path) in shared_paths
        must_copy = getattr(leaf, "weak_type", False) or is_shared
        if isinstance(leaf, jax.Array) and not is_deleted(leaf) and not must_copy:
            return leaf
        return _copy(path, leaf)

    return jax.tree_util.tree_map_with_path(copy_or_reuse, tree)


def delete(tree: PyTree) -> None:
    """Frees the memory of all jax arrays of a tree, which nobody may use afterwards."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not is_deleted(leaf):
            leaf.delete()


def device_put(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Moves an array, or PRNG keys, to a sharding, which may include other processes' devices.

    `jax.device_put` moves every other dtype to other processes' devices, but raises ValueError for
    keys (jax 0.12.0).
    """
    # The uint32 data of a key are additional last axes, which a sharding of the key leaves whole.
    if is_key(x) and not sharding.is_fully_addressable:
        key_data = jax.device_put(jax.random.key_data(x), sharding)
        array: jax.Array = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(x))
    else:
        array = jax.device_put(x, sharding)
    return array


def put_if_guarded(batches: PyTree, sharding: jax.sharding.Sharding | None = None) -> PyTree:
    """Puts NumPy arrays on a device if ``jax.transfer_guard`` would refuse that a program does it.

    A program transfers its arguments in less time: 41 µs a call with two arrays, and 78 with
    `jax.device_put`.
    """
    guard = jax.config.jax_transfer_guard_host_to_device  # type: ignore[attr-defined, unused-ignore]
    if guard in (None, "allow"):
        return batches

    def put(x: Any) -> Any:
        return x if isinstance(x, jax.Array) else jax.device_put(x, sharding)

    return jax.tree.map(put, batches)


def device_put_like(x: Any, other: jax.Array) -> jax.Array:
    """Moves an array to the sharding of another; if the other is uncommitted, so is the result."""
    # A program is compiled for the shardings of its committed arguments: one newly committed leaf
    # in a state would compile all of its programs again.
    return device_put(x, other.sharding) if other.committed else jnp.asarray(x)


def _copy(path: tuple[jax.tree_util.KeyEntry, ...], leaf: PyTree) -> jax.Array:
    is_valid = isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
    # NumPy has arrays of objects, strings, dates and times.
    kind = getattr(getattr(leaf, "dtype", None), "kind", None)
    if not is_valid or kind in ("O", "S", "U", "M", "m"):
        raise TypeError(
            f"expected an array at {path_str(path)}, got {spec(leaf)}. A state holds arrays "
            "only, as functrain.TrainState.create and bridge.create_state(model, tx) make it. "
            "Put functions and settings into the closure of the step."
        )
    if is_deleted(leaf):
        raise ValueError(
            f"expected a live array at {path_str(path)}, got {spec(leaf)} that was donated to a "
            "program. Use the state that the program returned."
        )
    if isinstance(leaf, jax.Array) and is_key(leaf):
        return jnp.copy(leaf)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    if not isinstance(leaf, jax.Array):
        require_integers_fit(leaf, f"the state at {path_str(path)}")
        # An explicit transfer passes `jax.transfer_guard`. On CPU it may share the memory.
        leaf = jax.device_put(np.asarray(leaf))
    return jnp.array(leaf, dtype=jax.dtypes.canonicalize_dtype(dtype))


def is_in_jit() -> bool:
    """Returns True if jax is tracing the caller for `jax.jit`."""
    # There, even a new array is a tracer. An explicit transfer passes `jax.transfer_guard`.
    return isinstance(jax.device_put(np.int32(0)), jax.core.Tracer)


def is_concrete(x: PyTree) -> bool:
    """Returns True if a leaf is a jax array and not a tracer.

    The array may be deleted, or on other processes' devices.
    """
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def is_deleted(x: PyTree) -> bool:
    """Returns True if a leaf is an array whose buffer was donated or deleted."""
    return is_concrete(x) and x.is_deleted()


def is_readable(x: PyTree) -> bool:
    """Returns True if a leaf is an array whose value this process can read."""
    return is_concrete(x) and not x.is_deleted() and x.is_fully_addressable


def aliases(tree: PyTree) -> list[tuple[str, str]]:
    """Returns the pairs of paths whose leaves share one buffer on a device."""
    buffers = [_buffer(leaf) for leaf in jax.tree.leaves(tree)]
    live = [buffer for buffer in buffers if buffer is not None]
    # Paths take longer than all of this, and most trees need none.
    if len(set(live)) == len(live):
        return []
    first: dict[object, str] = {}
    pairs = []
    for (path, _), buffer in zip(leaves_with_path(tree), buffers, strict=True):
        if buffer in first:
            pairs.append((first[buffer], path))
        elif buffer is not None:
            first[buffer] = path
    return pairs


def _buffer(leaf: PyTree) -> object:
    """Returns a value that two leaves have in common if they share memory; None without memory."""
    if not is_concrete(leaf) or leaf.is_deleted():
        return None
    if is_key(leaf) or not leaf.size or not leaf.sharding.addressable_devices:
        return id(leaf)
    # Not `addressable_shards`: its cache makes an array on one device refer to itself, so that only
    # the garbage collector would free it.
    shard = leaf.addressable_data(0)
    return shard.device, shard.unsafe_buffer_pointer()


def require_scalars(values: PyTree) -> None:
    """Raises TypeError if the value of a metric is not a real scalar."""
    if wrong := format_leaves(values, lambda x: jnp.shape(x) or jnp.iscomplexobj(x)):
        raise TypeError(
            "metrics: expected a scalar, float32[], from each metric's compute, or a dict of them, "
            f"got\n{wrong}\nReduce the value in compute, or return its elements as a dict."
        )
