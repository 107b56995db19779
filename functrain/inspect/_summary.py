"""A table of the leaves of a state or a model, and the cost of a step."""

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import NamedSharding

from functrain.common import _repr, _tree
from functrain.common._types import PyTree, Step, traits_of
from functrain.engine._guards import tracing_guards
from functrain.engine._plan import nbytes
from functrain.inspect._leaf import bytes_on_each, sharding_of
from functrain.inspect._sheet import sheet
from functrain.model._linen import from_linen
from functrain.model._model import Model
from functrain.model._nnx import from_nnx
from functrain.rewrites._compile import jit
from functrain.rewrites._equations import product_dtypes, walk_equations


def summary(
    state: Any, *, inputs: PyTree = None, step: Step[Any] | None = None, batch: PyTree = None
) -> str:
    """Returns a table of the trained leaves, with totals, as plain ASCII text.

    Args:
      state: A `TrainState` or any object with fields `params`, `model_state` and `opt_state`: the
        leaves of `params` are listed, with the totals of the three parts and of the state. Or a
        model (a linen or nnx module, a `Model`, a built Keras model): the leaves that an optimizer
        would train are listed. For any other pytree, all leaves are listed. Abstract states
        (`jax.eval_shape`) work as well. Leaves that are not arrays count as 0 elements.
      inputs: A batch of inputs, or their shapes, for a linen module or a `Model`, which holds no
        values. Nothing is computed.
      step: A step that takes the state, to show its cost; it is compiled for that.
      batch: One batch for the step, or its shapes.

    Returns:
      A row for each leaf: its path, dtype and shape, number of elements, and bytes of one copy
      (``1 KiB`` = 1024 bytes). If leaves are on several devices, also its sharding, and the bytes
      on each device. With a step, a line with the dtypes of its products of matrices, and one with
      the FLOPs and the memory traffic of one step of the plain program, as counted by the compiler.
      The body of a scan, such as that of micro-batches, counts once for each iteration; that of a
      `while` once, since its length is unknown. For a
      state on several devices the costs are those of each device, and the line says if loop bodies
      count once. The table is never cut to the width of a terminal.

    Raises:
      TypeError: `state` is neither a pytree of arrays nor a model.
      ValueError: A model holds no values and there are no `inputs`; or only one of `step` and
        `batch` is given.

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
        raise ValueError(
            "step and batch: expected both or neither. The cost of a step is shown for one batch."
        )
    parts = _parts(state, inputs)
    kind = "state" if hasattr(state, "opt_state") else "model"
    everything = parts if parts and kind == "model" else state
    # The first part is the trained one: only its leaves are listed.
    first_header, listed = next(iter(parts.items()), ("leaf", everything))
    is_divided = any(map(_spec, jax.tree.leaves(everything)))
    leaves = [(path, *_cells(leaf, is_divided)) for path, leaf in _tree.leaves_with_path(listed)]
    # The columns about devices are left out where all leaves are on one device.
    texts = (first_header, "array", "sharding")[: 2 + is_divided]
    numbers = ("count", "bytes", "bytes on each device")[: 2 + is_divided]
    blank = [""] * (len(texts) - 1)
    trees = {**parts, kind if parts else "": everything}
    totals = [
        (f"{name} (total)" if name else "total", *blank, *_sizes(tree, is_divided))
        for name, tree in trees.items()
    ]
    table = sheet((*texts, *numbers), leaves, totals, numbers=numbers)
    return table if step is None else f"{table}\n{_costs(step, state, batch)}"


def _cells(leaf: Any, is_divided: bool) -> tuple[str, ...]:
    """Returns the cells of a leaf's row, without its path."""
    spec = _tree.strong_spec(leaf)
    return (spec, _spec(leaf), *_sizes(leaf, True)) if is_divided else (spec, *_sizes(leaf))


def _sizes(tree: PyTree, is_divided: bool = False) -> tuple[str, ...]:
    """Returns the cells with the elements and bytes of a tree."""
    count = sum(math.prod(x.shape) for x in filter(_tree.is_array, jax.tree.leaves(tree)))
    sizes = f"{count:,}", _repr.format_bytes(nbytes(tree)), _repr.format_bytes(bytes_on_each(tree))
    return sizes[: 2 + is_divided]


def _spec(leaf: Any) -> str:
    """Returns the partition spec of a leaf; "" for a leaf on one device."""
    sharding = sharding_of(leaf)
    return str(sharding.spec) if isinstance(sharding, NamedSharding) else ""


def _parts(state: Any, inputs: PyTree) -> Mapping[str, PyTree]:
    """Returns the parts of a state or a model by name, the trained one first, or no parts."""
    # functrain does not import Keras, so its models are recognized by a method that only they have.
    if hasattr(state, "stateless_call"):
        return _keras_parts(state)
    names = ("params", "model_state", "opt_state")
    if all(hasattr(state, name) for name in names):
        return {name: getattr(state, name) for name in names}
    if (model := _as_model(state)) is not None:
        if inputs is None and not _is_nnx(state):
            raise ValueError(
                f"inputs: expected a batch of inputs, since {type(state).__name__} holds no "
                "values, got None. Pass inputs=x, or jax.ShapeDtypeStruct(shape, dtype)."
            )
        # A model has no opt_state, the last of the names.
        return dict(zip(names, jax.eval_shape(model.init, jax.random.key(0), inputs), strict=False))
    if jax.tree_util.all_leaves([state]) and not _tree.is_array(state):
        raise TypeError(
            "state: expected a TrainState, another pytree of arrays or a model, got "
            f"{type(state).__name__}."
        )
    return {}


def _is_nnx(module: Any) -> bool:
    # If the object is an nnx module, nnx has been imported. Importing it here would be slow.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(module, nnx.Module)


def _as_model(module: Any) -> Model | None:
    """Returns a module or `Model` as a `Model`, anything else as None."""
    if isinstance(module, nn.Module):
        return from_linen(module)
    if _is_nnx(module):
        return from_nnx(module)
    return module if isinstance(module, Model) else None


def _keras_parts(model: Any) -> Mapping[str, PyTree]:
    if not model.built:
        raise ValueError(
            f"state: expected a built Keras model, got {model.name!r}, which is not built. Call "
            "it once on a batch, or call model.build(shape)."
        )
    return {
        "trainable": _by_path(model.trainable_variables),
        "non_trainable": _by_path(model.non_trainable_variables),
    }


def _by_path(variables: Any) -> dict[str, Any]:
    """Returns the values of variables by path."""
    # Keras may give several variables the same path: a number makes those unique.
    values: dict[str, Any] = {}
    for variable in variables:
        is_taken = variable.path in values
        values[variable.path + f"#{len(values)}" * is_taken] = variable.value
    return values


def _costs(step: Any, state: PyTree, batch: PyTree) -> str:
    """Returns a line with the cost of one step, as counted by the compiler."""
    args = traits_of(step).wrap_state(state), batch
    with tracing_guards():
        # A new function: jit of the step itself would reuse a trace made without the guards.
        traced = jit(lambda *args: step(*args)).trace(*args)
        lowered = traced.lower()
    flops, traffic = _count(lowered)
    scans = list(_scans(traced.jaxpr))
    is_divided = any(map(sharding_of, jax.tree.leaves(args)))
    # A body alone has no shardings, so the share of one device is unknown.
    for body, missing_count in () if is_divided else scans:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in body.in_avals]
        body_flops, body_traffic = _count(jit(core.jaxpr_as_fun(body)).lower(*shapes))
        flops, traffic = flops + missing_count * body_flops, traffic + missing_count * body_traffic
    where = " on each device" * is_divided
    note = "; the body of each scan counts once" * (is_divided and bool(scans))
    size = _repr.format_bytes(traffic)
    products = [f"{count:,} in {dtype}" for dtype, count in product_dtypes(traced.jaxpr).items()]
    return (
        f"products of matrices and convolutions: {', '.join(products) or 'none'}\n"
        f"one step{where}: {flops:,.0f} FLOPs, {size} of memory read and written{note}"
    )


def _count(lowered: Any) -> tuple[float, float]:
    """Returns the FLOPs and the bytes read and written of a program, each loop body once."""
    costs = lowered.compile().cost_analysis() or {}
    return costs.get("flops", math.nan), costs.get("bytes accessed", math.nan)


def _scans(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """Yields the body of each scan, and how many more times it runs than the compiler counts."""
    for eqn, _, executions in walk_equations(jaxpr):
        if eqn.primitive is primitives.scan_p:
            length, unroll = eqn.params["length"], eqn.params["unroll"]
            # A loop of unrolled bodies, which counts once, and the remaining bodies.
            counted = length if unroll >= length else unroll + length % unroll
            if length > counted:
                yield eqn.params["jaxpr"], executions * (length - counted)
