"""A state as a table: what is in it, and how large."""

import math
from typing import Any

import jax
from rich import box
from rich.table import Table

from functrain.common import _repr, _table, _tree
from functrain.common._types import PyTree

_PARTS = ("params", "model_state", "opt_state")


def summary(state: PyTree) -> str:
    """Returns a table of the leaves of `state.params`, with totals, as plain ASCII text.

    Args:
      state: A `TrainState` or anything with fields `params`, `model_state` and `opt_state`: the
        leaves of `params` are listed, and the totals are those of the three parts and of the
        whole. Any other pytree: all its leaves are listed. Abstract states
        (`jax.eval_shape`) will do. A leaf that is no array counts nothing.

    Returns:
      A row for each leaf: its path, dtype, shape, number of elements, and bytes on one copy
      (``1 KiB`` = 1024 bytes). Never cut to the width of a terminal.

    Raises:
      TypeError: `state` is no pytree but one object, such as a model.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> params = {"dense": {"bias": jnp.zeros(8), "kernel": jnp.ones((64, 8))}}
      >>> print(summary(TrainState.create(params=params, tx=optax.adam(1e-3))))
      +--------------------+---------+---------+-------+---------+
      | params             | dtype   | shape   | count |   bytes |
      +--------------------+---------+---------+-------+---------+
      | dense/bias         | float32 | [8]     |     8 |    32 B |
      | dense/kernel       | float32 | [64, 8] |   512 | 2.0 KiB |
      +--------------------+---------+---------+-------+---------+
      | all of params      |         |         |   520 | 2.0 KiB |
      | all of model_state |         |         |     0 |     0 B |
      | all of opt_state   |         |         | 1,041 | 4.1 KiB |
      | whole state        |         |         | 1,562 | 6.1 KiB |
      +--------------------+---------+---------+-------+---------+
    """
    if jax.tree_util.all_leaves([state]) and not _tree.is_array(state):
        keras = hasattr(state, "stateless_call")
        raise TypeError(
            f"state: expected a TrainState or another pytree of arrays, got {type(state).__name__}."
            + (" Its state is bridge.create_state(model, tx); or model.summary()." if keras else "")
        )
    whole = not all(hasattr(state, part) for part in _PARTS)
    listed = state if whole else state.params
    table = Table(box=box.ASCII2)
    for heading in ("leaf" if whole else "params", "dtype", "shape"):
        table.add_column(heading, no_wrap=True)
    for heading in ("count", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for path, leaf in _tree.leaves_with_path(listed):
        table.add_row(path, *_kind(leaf), *_size(leaf))
    table.add_section()
    for part in () if whole else _PARTS:
        table.add_row(f"all of {part}", "", "", *_size(getattr(state, part)))
    table.add_row("all" if whole else "whole state", "", "", *_size(state))
    return _table.text(table)


def _kind(leaf: Any) -> tuple[str, str]:
    if not _tree.is_array(leaf):
        return type(leaf).__name__, "-"
    return str(leaf.dtype), str(list(leaf.shape))


def _size(tree: PyTree) -> tuple[str, str]:
    """The number of elements in a tree, and its bytes for people."""
    count = size = 0
    for _, leaf in _tree.leaves_with_path(tree):
        if _tree.is_array(leaf):
            count += math.prod(leaf.shape)
            size += math.prod(leaf.shape) * leaf.dtype.itemsize
    return f"{count:,}", _repr.size(size)
