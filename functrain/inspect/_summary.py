"""A table of the leaves of a state or a model, and the cost of a step."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding

from functrain.common import _repr, _tree
from functrain.common._compile import jit
from functrain.common._types import PyTree, Step, traits_of
from functrain.engine._guards import tracing_guards
from functrain.engine._plan import nbytes
from functrain.inspect._leaf import bytes_on_each, sharding_of
from functrain.inspect._sheet import sheet
from functrain.model._linen import from_linen
from functrain.model._model import Model
from functrain.model._nnx import from_nnx


def summary(
    state: Any, *, inputs: PyTree = None, step: Step[Any] | None = None, batch: PyTree = None
) -> str:
    """Returns a table of the trained leaves, with totals, as plain ASCII text.

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
    parts = _parts(state, inputs)
    kind = "state" if hasattr(state, "opt_state") else "model"
    whole = parts if parts and kind == "model" else state
    first, listed = next(iter(parts.items()), ("leaf", whole))
    is_divided = any(map(_spec, jax.tree.leaves(whole)))
    leaves = [(path, *_cells(leaf, is_divided)) for path, leaf in _tree.leaves_with_path(listed)]
    trees = {f"all of {name}": tree for name, tree in parts.items()}
    trees[f"whole {kind}" if parts else "all"] = whole
    texts = (first, "dtype", "shape", "sharding")[: 3 + is_divided]
    numbers = ("count", "bytes", "bytes on each device")[: 2 + is_divided]
    blank = [""] * (len(texts) - 1)
    totals = [(name, *blank, *_sizes(tree, is_divided)) for name, tree in trees.items()]
    table = sheet((*texts, *numbers), leaves, totals, numbers=numbers)
    return table if step is None else f"{table}\n{_costs(step, state, batch)}"


def _cells(leaf: Any, is_divided: bool) -> tuple[str, ...]:
    is_array = _tree.is_array(leaf)
    kind = (str(leaf.dtype), str(list(leaf.shape))) if is_array else (type(leaf).__name__, "-")
    return (*kind, _spec(leaf), *_sizes(leaf, True)) if is_divided else (*kind, *_sizes(leaf))


def _sizes(tree: PyTree, is_divided: bool = False) -> tuple[str, ...]:
    count = sum(math.prod(x.shape) for x in filter(_tree.is_array, jax.tree.leaves(tree)))
    sizes = f"{count:,}", _repr.format_bytes(nbytes(tree)), _repr.format_bytes(bytes_on_each(tree))
    return sizes[: 2 + is_divided]


def _spec(leaf: Any) -> str:
    """Returns the axes of the mesh that divide a leaf; "" for a leaf on one device."""
    sharding = sharding_of(leaf)
    return str(sharding.spec) if isinstance(sharding, NamedSharding) else ""


def _parts(state: Any, inputs: PyTree) -> Mapping[str, PyTree]:
    """Returns the parts of a state or a model by name, the trained one first; else nothing."""
    if hasattr(state, "stateless_call"):
        return _keras_parts(state)
    names = ("params", "model_state", "opt_state")
    if all(hasattr(state, name) for name in names):
        return {name: getattr(state, name) for name in names}
    if (model := _model_of(state)) is not None:
        if inputs is None and not _is_nnx(state):
            raise ValueError(
                f"inputs: expected a batch of them, since {type(state).__name__} has no values of "
                "its own, got none. Pass inputs=x, or jax.ShapeDtypeStruct(shape, dtype)."
            )
        return dict(zip(names, jax.eval_shape(model.init, jax.random.key(0), inputs), strict=False))
    if jax.tree_util.all_leaves([state]) and not _tree.is_array(state):
        raise TypeError(
            "state: expected a TrainState, another pytree of arrays or a model, got "
            f"{type(state).__name__}."
        )
    return {}


def _is_nnx(module: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")  # imported by whoever has a module of it
    return nnx is not None and isinstance(module, nnx.Module)


def _model_of(thing: Any) -> Model | None:
    if isinstance(thing, nn.Module):
        return from_linen(thing)
    if _is_nnx(thing):
        return from_nnx(thing)
    return thing if isinstance(thing, Model) else None


def _keras_parts(model: Any) -> Mapping[str, PyTree]:
    if not model.built:
        raise ValueError(
            f"state: expected a Keras model that is built, got {model.name!r}, which is not: call "
            "it on a batch once, or model.build(shape)."
        )
    return {
        "trainable": _by_path(model.trainable_variables),
        "non_trainable": _by_path(model.non_trainable_variables),
    }


def _by_path(variables: Any) -> dict[str, Any]:
    """Returns values by their paths, with a number where Keras gives a path twice."""
    values: dict[str, Any] = {}
    for variable in variables:
        is_taken = variable.path in values
        values[variable.path + f"#{len(values)}" * is_taken] = variable.value
    return values


def _costs(step: Any, state: PyTree, batch: PyTree) -> str:
    """Returns a line with the cost of one step, as the compiler counts it."""
    with tracing_guards(step):  # jit of the step itself would reuse a trace that no guard has seen
        program = jit(lambda *args: step(*args))
        lowered = program.lower(traits_of(step).wrap_state(state), batch)
    costs = lowered.compile().cost_analysis() or {}
    flops, moved = costs.get("flops", math.nan), costs.get("bytes accessed", math.nan)
    return f"one step: {flops:,.0f} FLOPs, {_repr.format_bytes(moved)} of memory read and written"
