"""A table of the leaves of a state or a model, and the cost of a step."""

import math
from typing import Any

import jax

from functrain.common import _repr, _tree
from functrain.common._table import sheet
from functrain.common._types import PyTree, Step, traits_of
from functrain.engine._plan import nbytes
from functrain.inspect._cost import product_flops, trace_step
from functrain.rewrites._equations import product_dtypes


def summary(state: Any, *, step: Step[Any] | None = None, batch: PyTree = None) -> str:
    """Returns a table of the trained leaves, with totals, as plain ASCII text to print.

    Args:
      state: A `TrainState` or any object with fields `params`, `model_state` and `opt_state`: the
        leaves of `params` are listed, with the totals of the three parts and of the state. For any
        other pytree, such as the params of a model, all leaves are listed. Abstract states
        (`jax.eval_shape`) work as well. Leaves that are not arrays count as 0 elements.
      step: A step that takes the state, to show its products. It is traced for that.
      batch: One batch for the step, or its shapes.

    Returns:
      A row for each leaf: its path, dtype and shape, number of elements, and bytes of one copy
      (``1 KiB`` = 1024 bytes); `placement` shows what each device holds. With a step, the dtypes
      of its products of matrices and convolutions, and their FLOPs on all devices; the body of a
      scan, such as that of micro-batches, counts once for each iteration, that of a `while` once.
      The table is never cut to the width of a terminal.

    Raises:
      ValueError: Only one of `step` and `batch` is given.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> params = {"dense": {"bias": jnp.zeros(8), "kernel": jnp.ones((64, 8))}}
      >>> print(summary(TrainState.create(params=params, tx=optax.adam(1e-3))))
      +---------------------+----------------+-------+---------+
      | params              | array          | count |   bytes |
      +---------------------+----------------+-------+---------+
      | dense/bias          | float32[8]     |     8 |    32 B |
      | dense/kernel        | float32[64, 8] |   512 | 2.0 KiB |
      +---------------------+----------------+-------+---------+
      | params (total)      |                |   520 | 2.0 KiB |
      | model_state (total) |                |     0 |     0 B |
      | opt_state (total)   |                | 1,041 | 4.1 KiB |
      | state (total)       |                | 1,562 | 6.1 KiB |
      +---------------------+----------------+-------+---------+
    """
    if (step is None) != (batch is None):
        raise ValueError("step and batch: expected both or neither. A step is traced for a batch.")
    names = "params", "model_state", "opt_state"
    is_train_state = all(hasattr(state, name) for name in names)
    parts = {name: getattr(state, name) for name in names} if is_train_state else {}
    trees = {**parts, "state" if parts else "": state}
    # The first part is the trained one: only its leaves are listed.
    header, listed = next(iter(parts.items()), ("leaf", state))
    leaves = [
        (path, _tree.strong_spec(leaf), *_sizes(leaf))
        for path, leaf in _tree.leaves_with_path(listed)
    ]
    totals = [
        (f"{name} (total)" if name else "total", "", *_sizes(tree)) for name, tree in trees.items()
    ]
    numbers = "count", "bytes"
    table = sheet((header, "array", *numbers), leaves, totals, numbers=numbers)
    return table if step is None else f"{table}\n{_costs(step, state, batch)}"


def _sizes(tree: PyTree) -> tuple[str, str]:
    """Returns the cells with the elements and the bytes of a tree."""
    count = sum(math.prod(x.shape) for x in filter(_tree.is_array, jax.tree.leaves(tree)))
    return f"{count:,}", _repr.format_bytes(nbytes(tree))


def _costs(step: Any, state: PyTree, batch: PyTree) -> str:
    """Returns lines with the products of one step, and their operations."""
    jaxpr = trace_step(step, traits_of(step).wrap_state(state), batch)
    products = [f"{count:,} in {dtype}" for dtype, count in product_dtypes(jaxpr).items()]
    return (
        f"products of matrices and convolutions: {', '.join(products) or 'none'}\n"
        f"FLOPs of the products of one step: {product_flops(jaxpr):,}"
    )
