"""The loop inside a program: a pure function repeated over stacked inputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from functrain.common import _tree
from functrain.common._checks import require_no_problems
from functrain.common._types import PyTree

Body = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


def repeat(
    body: Body, carry: PyTree, stacked: PyTree, k: int, n: jax.Array | None, unroll: int = 1
) -> tuple[PyTree, PyTree]:
    """Applies ``body(carry, x) -> (carry, y)`` to the first n of K stacked inputs, in turn.

    It is `lax.scan` with a number of steps that the compiler does not know. So every n runs the
    same compiled body, and results do not depend, to the bit, on how a run is cut into chunks:
    the compiler would take a loop of known length one apart, and fuse its operations otherwise.

    Args:
      body: Traced once.
      carry: Its structure, shapes, dtypes and weak types must come back unchanged.
      stacked: Every leaf `[K, ...]`. It may have no leaves.
      k: K.
      n: i32[], 0 to K; None for all K, with `lax.scan` itself: for devices that want to know the
        length.
      unroll: Of `lax.scan`.

    Returns:
      The carry after n applications, and the y stacked `[K, ...]`, zeros from n on.
    """
    first = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), stacked)
    run, returned = _stage(body, carry, first)
    new, outs = require_pair(returned)
    check_carry(carry, new)
    if n is None:
        result: tuple[PyTree, PyTree] = lax.scan(run, carry, stacked, length=k, unroll=unroll)
        return result
    if k == 1:
        # The compiler sees through an index into a single row, and fuses the body otherwise, to
        # other last bits: give it two.
        stacked = jax.tree.map(lambda x: jnp.concatenate([x, x]), stacked)

    def once(i: jax.Array, both: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        carry, rows = both
        x = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stacked)
        carry, y = run(carry, x)
        rows = jax.tree.map(
            lambda row, y: lax.dynamic_update_index_in_dim(row, jnp.asarray(y, row.dtype), i, 0),
            rows,
            y,
        )
        return carry, rows

    rows = jax.tree.map(lambda y: _rows(y, max(k, 2)), outs)
    carry, rows = lax.fori_loop(0, n, once, (carry, rows))
    return carry, rows if k > 1 else jax.tree.map(lambda row: row[:1], rows)


def _rows(y: Any, k: int) -> jax.Array:
    """Returns zeros `[k, ...]` for what is like y: where a mesh has explicit axes, sharded so."""
    sharding = y.sharding
    zeros = jnp.zeros((k, *y.shape), y.dtype)
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return zeros
    # Not by out_sharding=, from which jax 0.12 drops the mesh where nothing is divided.
    where = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    resharded: jax.Array = jax.sharding.reshard(zeros, where)
    return resharded


def require_pair(returned: Any) -> tuple[PyTree, PyTree]:
    """Refuses what is not (state, logs)."""
    several = type(returned) in (tuple, list)
    if several and len(returned) == 2:
        return returned[0], returned[1]
    got = f"{len(returned)} things" if several else _tree.spec(returned)
    raise TypeError(
        f"step: expected (state, logs) from it, got {got}. Without logs it returns (state, {{}})."
    )


def reject_text_logs(body: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a body that raises TypeError where it logs a text, which jax cannot return."""

    def checked(*args: PyTree) -> Any:
        returned = body(*args)
        logs = returned[1] if type(returned) in (tuple, list) and len(returned) == 2 else ()
        for path, leaf in _tree.leaves_with_path(logs):
            if isinstance(leaf, str | bytes):
                raise TypeError(
                    f"logs: expected arrays and numbers, got the text {leaf!r} at {path}. A hook "
                    "can write texts: event.samples[name] = text."
                )
        return returned

    return checked


def check_stacked(stacked: PyTree, k: int) -> None:
    """Refuses a chunk whose leaves do not all have the leading axis K."""
    require_no_problems(
        "chunk",
        _tree.format_leaves(stacked, lambda x: not getattr(x, "shape", ()) or x.shape[0] != k),
        f"{k} stacked batches, every leaf [{k}, ...]",
        "Stack them with jax.tree.map(lambda *leaves: np.stack(leaves), *batches), or take them "
        "from ArrayLoader.chunk(epoch, start, k).",
    )


def check_carry(old: PyTree, new: PyTree) -> None:
    """Refuses a step whose new state does not fit where the old one was."""
    changed = _tree.differences(old, new)
    if changed:
        lost = any("model_state" in line and ": missing" in line for line in changed)
        hint = " A loss hands the model state on: Aux(model_state, ...)." if lost else ""
        raise TypeError(
            "step: expected a new state of the old one's structure, shapes and dtypes, got\n"
            f"{_tree.bullets(changed)}\n"
            "A program that repeats the step needs them constant. Cast with "
            "x.astype(old.dtype), and make numbers in the state arrays of a given dtype, such as "
            f"jnp.zeros((), jnp.float32).{hint}"
        )


def _stage(body: Body, *args: PyTree) -> tuple[Callable[..., Any], Any]:
    """Traces a function once; returns it as traced, and the abstract values it returns."""
    closed, shapes = jax.make_jaxpr(body, return_shape=True)(*args)
    structure = _tree.structure(shapes)
    evaluate: Any = core.jaxpr_as_fun(closed)

    def run(*args: PyTree) -> Any:
        return jax.tree.unflatten(structure, evaluate(*jax.tree.leaves(args)))

    return run, jax.tree.unflatten(structure, closed.out_avals)
