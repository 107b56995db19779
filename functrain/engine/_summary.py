"""A state or a model as a table: what is in it, how large, where it lies, what a step costs."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding
from rich import box
from rich.table import Table

from functrain.common import _repr, _table, _tree
from functrain.common._types import PyTree, Step
from functrain.engine._guards import guarded
from functrain.model._linen import from_linen
from functrain.model._model import Model
from functrain.model._nnx import from_nnx


def summary(
    state: Any, *, inputs: PyTree = None, step: Step[Any] | None = None, batch: PyTree = None
) -> str:
    """Returns a table of what is trained, leaf by leaf, with totals, as plain ASCII text.

    Args:
      state: A `TrainState` or anything with fields `params`, `model_state` and `opt_state`: the
        leaves of `params` are listed, and the totals are those of the three parts and of the
        whole. Or a model: a module of linen or nnx, a `Model`, a built Keras model; what an
        optimizer would train is listed. Any other pytree: all its leaves are listed. Abstract
        states (`jax.eval_shape`) will do. A leaf that is no array counts nothing.
      inputs: For a linen module or a `Model`, which has no values of its own: a batch of inputs,
        or their shapes. Nothing is computed.
      step: A step that takes the state, for what it costs; it is compiled for that.
      batch: One batch for the step, or its shapes.

    Returns:
      A row for each leaf: its path, dtype, shape, number of elements, and bytes on one copy
      (``1 KiB`` = 1024 bytes); its sharding where leaves lie on several devices, and then the
      bytes on each. With a step the operations on numbers and the bytes of memory that one step
      of the plain program takes, as the compiler counts them: the body of a loop within it once.
      Never cut to the width of a terminal.

    Raises:
      TypeError: `state` is no pytree and no model, but one object.
      ValueError: A model has no values yet and there are no `inputs`; or a step comes without a
        batch, or a batch without a step.

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
    if (step is None) != (batch is None):
        raise ValueError("step and batch: expected both or neither, for what a step costs.")
    parts, whole = _parts(state, inputs)
    rows = _Rows(whole)
    first, *rest = parts.items() if parts else [("leaf", whole)]
    rows.heading(first[0])
    for path, leaf in _tree.leaves_with_path(first[1]):
        rows.leaf(path, leaf)
    rows.table.add_section()
    for name, tree in (first, *rest) if parts else ():
        rows.total(f"all of {name}", tree)
    is_state = hasattr(state, "opt_state")
    rows.total("all" if not parts else f"whole {'state' if is_state else 'model'}", whole)
    costs = "" if step is None else f"\n{_costs(step, state, batch)}"
    return _table.text(rows.table) + costs


class _Rows:
    """A table that has a column for shardings where something lies on several devices."""

    def __init__(self, whole: PyTree) -> None:
        self.table = Table(box=box.ASCII2)
        self._placed = any(_spec(leaf) for leaf in jax.tree.leaves(whole))

    def heading(self, first: str) -> None:
        for name in (first, "dtype", "shape", *(["sharding"] * self._placed)):
            self.table.add_column(name, no_wrap=True)
        for name in ("count", "bytes", *(["bytes on each device"] * self._placed)):
            self.table.add_column(name, justify="right", no_wrap=True)

    def leaf(self, path: str, leaf: Any) -> None:
        kind = (str(leaf.dtype), str(list(leaf.shape))) if _tree.is_array(leaf) else ()
        self._row(path, *(kind or (type(leaf).__name__, "-")), spec=_spec(leaf), tree=leaf)

    def total(self, name: str, tree: PyTree) -> None:
        self._row(name, "", "", spec="", tree=tree)

    def _row(self, *cells: str, spec: str, tree: PyTree) -> None:
        count = size = each = 0
        for leaf in filter(_tree.is_array, jax.tree.leaves(tree)):
            count += math.prod(leaf.shape)
            size += math.prod(leaf.shape) * leaf.dtype.itemsize
            each += math.prod(_on_each(leaf)) * leaf.dtype.itemsize
        sizes = [f"{count:,}", _repr.size(size)]
        if self._placed:
            cells, sizes = (*cells, spec), [*sizes, _repr.size(each)]
        self.table.add_row(*cells, *sizes)


def _spec(leaf: Any) -> str:
    """Returns over which axes of a mesh a leaf is divided; nothing where it is on one device."""
    where = getattr(leaf, "sharding", None)
    return str(where.spec) if isinstance(where, NamedSharding) and where.mesh.size > 1 else ""


def _on_each(leaf: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape) if _spec(leaf) else leaf.shape
    return shape


def _parts(state: Any, inputs: PyTree) -> tuple[Mapping[str, PyTree], PyTree]:
    """Returns the parts of a state or a model by name, the trained one first, and the whole."""
    if hasattr(state, "stateless_call"):
        parts = _of_keras(state)
        return parts, parts
    names = ("params", "model_state", "opt_state")
    if all(hasattr(state, name) for name in names):
        return {name: getattr(state, name) for name in names}, state
    if (model := _model_of(state)) is not None:
        if inputs is None and not _is_nnx(state):
            raise ValueError(
                f"inputs: expected a batch of them, since {type(state).__name__} has no values of "
                "its own, got none. Pass inputs=x, or jax.ShapeDtypeStruct(shape, dtype)."
            )
        found = jax.eval_shape(model.init, jax.random.key(0), inputs)
        parts = dict(zip(names, found, strict=False))
        return parts, parts
    if jax.tree_util.all_leaves([state]) and not _tree.is_array(state):
        raise TypeError(
            "state: expected a TrainState, another pytree of arrays or a model, got "
            f"{type(state).__name__}."
        )
    return {}, state


def _is_nnx(module: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")  # who has a module has imported it
    return nnx is not None and isinstance(module, nnx.Module)


def _model_of(thing: Any) -> Model | None:
    if isinstance(thing, nn.Module):
        return from_linen(thing)
    if _is_nnx(thing):
        return from_nnx(thing)
    return thing if isinstance(thing, Model) else None


def _of_keras(model: Any) -> Mapping[str, PyTree]:
    if not model.built:
        raise ValueError(
            f"state: expected a Keras model that is built, got {model.name!r}, which is not: call "
            "it on a batch once, or model.build(shape)."
        )
    kinds = {
        "trainable": model.trainable_variables,
        "non_trainable": model.non_trainable_variables,
    }
    return {name: _by_path(found) for name, found in kinds.items()}


def _by_path(variables: Any) -> dict[str, Any]:
    """Returns values by their paths, of which Keras gives some twice."""
    found: dict[str, Any] = {}
    for variable in variables:
        clash = variable.path in found
        found[variable.path + f"#{len(found)}" * clash] = variable.value
    return found


def _costs(step: Any, state: PyTree, batch: PyTree) -> str:
    """Says what one step takes, as the compiler counts."""
    args = getattr(step, "traced_with", lambda *args: args)(state, batch)

    def once(*args: Any) -> Any:
        with guarded():
            return step(*args)

    found = jax.jit(once).lower(*args).compile().cost_analysis() or {}
    flops, moved = found.get("flops", math.nan), found.get("bytes accessed", math.nan)
    return f"one step: {flops:,.0f} FLOPs, {_repr.size(moved)} of memory read and written"
