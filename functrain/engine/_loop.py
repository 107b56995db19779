"""The loop inside a program: a pure function repeated over stacked inputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._types import PyTree

Body = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


def repeat(
    body: Body,
    carry: PyTree,
    stacked: PyTree,
    k: int,
    n: jax.Array | None,
    unroll: int = 1,
    *,
    unfused: bool = False,
) -> tuple[PyTree, PyTree]:
    """Applies ``body(carry, x) -> (carry, y)`` to the first n of K stacked inputs, in turn.

    Works like `lax.scan` with a number of steps that the compiler does not know. So every n runs
    the same compiled body, and results do not depend, to the bit, on how a run is cut into chunks:
    the compiler would dissolve a loop whose known length is one, and fuse its operations in
    another way.

    Args:
      body: Traced once.
      carry: The body must return it with the same structure, shapes and dtypes.
      stacked: Every leaf `[K, ...]`. It may have no leaves.
      k: K.
      n: i32[], 0 to K. None applies the body to all K inputs by `lax.scan`, for devices on which
        loops of unknown length are slow.
      unroll: Passed to `lax.scan`; used only if n is None.
      unfused: Keep the compiler from fusing the body with the loop's index into `stacked`, so that
        it computes the bits that it has outside of a loop; used only if n is given.

    Returns:
      The carry after n applications, and the y stacked `[K, ...]`, zeros from row n on.
    """
    # With its shardings, without which the loop would not find the trace that is made with it.
    _, first = _stage(lambda tree: jax.tree.map(lambda x: x[0], tree), stacked)
    # One trace serves the checks, the shapes of the rows and the loop.
    run_weak, (new_carry, outputs) = _stage(body, carry, first)
    has_structure = _tree.structure(carry) == _tree.structure(new_carry)
    if has_structure and _tree.differences(carry, new_carry):
        carry = jax.tree.map(_promote_weak, carry, new_carry)
        run_weak, (new_carry, outputs) = _stage(body, carry, first)
    check_carry(carry, new_carry)
    carry = strong(carry)

    def run(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        carry, y = run_weak(carry, x)
        return strong(carry), y

    if n is None:
        result: tuple[PyTree, PyTree] = lax.scan(run, carry, stacked, length=k, unroll=unroll)
        return result
    if k == 1:
        # The compiler knows the result of an index into a single row. It then fuses the body in
        # another way, which changes the last bits. With two rows it cannot know.
        stacked = jax.tree.map(lambda x: jnp.concatenate([x, x]), stacked)

    def take(i: jax.Array) -> PyTree:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stacked)

    def run_step(i: jax.Array, loop_state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        carry, rows = loop_state
        if unfused:
            # The smaller of the two is i. XLA compiles a small loop into one function, where it
            # orders sums of products differently, but not if the loop has a sort (jax 0.12).
            i = jnp.sort(jnp.stack([i, n]))[0]
            # XLA fuses nothing with a branch, and it cannot know that this one is always taken. It
            # would fuse the index with products of a matrix and a vector, and with sums, and order
            # those differently. (XLA drops `lax.optimization_barrier` on CPUs.)
            x = lax.cond(n > 0, take, lambda i: take(jnp.zeros_like(i)), i)
        else:
            x = take(i)
        carry, y = run(carry, x)
        rows = jax.tree.map(
            lambda row, y: lax.dynamic_update_index_in_dim(row, jnp.asarray(y, row.dtype), i, 0),
            rows,
            y,
        )
        return carry, rows

    rows = jax.tree.map(lambda y: _zero_rows(y, max(k, 2)), outputs)
    carry, rows = lax.fori_loop(0, n, run_step, (carry, rows))
    return carry, rows if k > 1 else jax.tree.map(lambda row: row[:1], rows)


def _zero_rows(y: Any, k: int) -> jax.Array:
    """Returns zeros `[k, ...]` for k outputs like y, sharded like y if the mesh is explicit."""
    sharding = y.sharding
    zeros = jnp.zeros((k, *y.shape), y.dtype)
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return zeros
    # `jnp.zeros(out_sharding=)` will not do: jax 0.12 drops the mesh from it if nothing is divided.
    row_sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    resharded: jax.Array = jax.sharding.reshard(zeros, row_sharding)
    return resharded


def check_results(step: Callable[..., Any]) -> Callable[..., tuple[PyTree, PyTree]]:
    """Returns a step that raises an error for results other than a state and logs.

    Raises:
      TypeError: They are not a pair, or a log is a string, which jax cannot return.
      ValueError: Two logs have the same path, by which a history would name both.
    """

    def checked(*args: PyTree) -> tuple[PyTree, PyTree]:
        returned = step(*args)
        # The exact types: a state that is a NamedTuple of two fields is not a pair.
        is_sequence = type(returned) in (tuple, list)
        if not (is_sequence and len(returned) == 2):
            got = f"{len(returned)} values" if is_sequence else _tree.spec(returned)
            raise TypeError(
                f"step: expected it to return (state, logs), got {got}. Without logs, return "
                "(state, {})."
            )
        state, logs = returned
        paths: set[str] = set()
        for path, leaf in _tree.leaves_with_path(logs):
            advice = "Rename one: nested dicts are reported under their paths."
            require(path not in paths, "logs", "a name of its own for each log", path, advice)
            paths.add(path)
            if isinstance(leaf, str | bytes):
                raise TypeError(
                    f"logs: expected arrays and numbers, got the string {leaf!r} at {path}. A hook "
                    "can log strings: event.samples[name] = text."
                )
        return state, logs

    return checked


def check_stacked(stacked: PyTree, k: int) -> None:
    """Raises ValueError unless all leaves of a chunk have the leading axis K."""
    require_no_problems(
        "chunk",
        _tree.format_leaves(stacked, lambda x: not getattr(x, "shape", ()) or x.shape[0] != k),
        f"{k} stacked batches, every leaf [{k}, ...]",
        "Stack them with jax.tree.map(lambda *leaves: np.stack(leaves), *batches), or take them "
        "from ArrayLoader.chunk(epoch, start, k).",
    )


def strong(tree: PyTree) -> PyTree:
    """Returns a tree without weak types, which a state cannot keep: they do not affect its values.

    A Python number becomes an array.
    """

    def to_strong(x: Any) -> Any:
        kind = jax.typeof(x)
        return lax.convert_element_type(x, kind.dtype) if kind.weak_type else x

    return jax.tree.map(to_strong, tree)


def _promote_weak(old: Any, new: Any) -> Any:
    """Returns a leaf of the carry; one of a weak type with the new dtype, as `lax.scan` does."""
    is_weaker = jax.typeof(old).weak_type and old.dtype != new.dtype
    return lax.convert_element_type(old, new.dtype) if is_weaker else old


def check_carry(old: PyTree, new: PyTree) -> None:
    """Raises TypeError unless a step's new state has the old one's structure, shapes and dtypes."""
    changed = _tree.differences(old, new)
    # The usual mistake of a loss without Aux.
    loses_model_state = any("model_state" in line and ": missing" in line for line in changed)
    hint = " A loss returns the model state in Aux(model_state, ...)." if loses_model_state else ""
    require_no_problems(
        "step",
        changed,
        "a new state with the old one's structure, shapes and dtypes",
        "A program that repeats the step needs them constant. Cast with x.astype(old.dtype), and "
        "make numbers in the state arrays of a given dtype, such as jnp.zeros((), jnp.float32)."
        + hint,
        error=TypeError,
    )


def _stage(function: Callable[..., Any], *args: PyTree) -> tuple[Callable[..., Any], Any]:
    """Traces a function once; returns the traced function, and its abstract results."""
    # The loop finds the trace in the cache of `jax.jit`, and has a call in place of the operations,
    # which XLA inlines. Tracing all of them again took a third longer for 12 transformer blocks.
    jitted = jax.jit(function)
    traced = jitted.trace(*args)
    # Not the shapes of `out_info`: they lack the shardings that `_zero_rows` needs.
    return jitted, jax.tree.unflatten(_tree.structure(traced.out_info), traced.jaxpr.out_avals)
