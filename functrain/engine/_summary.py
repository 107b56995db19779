"""A state or a model as a table: what is in it, how large, where it lies, what a step costs."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding

from functrain.common import _repr, _tree
from functrain.common._compile import jit
from functrain.common._types import PyTree, Step
from functrain.engine._guards import guarded
from functrain.engine._plan import bytes_on_each, nbytes
from functrain.engine._sheet import sheet
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
    parts = _parts(state, inputs)
    kind = "state" if hasattr(state, "opt_state") else "model"
    whole = parts if parts and kind == "model" else state
    placed = any(map(_spec, jax.tree.leaves(whole)))
    first, listed = next(iter(parts.items()), ("leaf", whole))
    leaves = [
        (path, *_kind(leaf), *[_spec(leaf)] * placed, *_sizes(leaf, placed))
        for path, leaf in _tree.leaves_with_path(listed)
    ]
    trees = {f"all of {name}": tree for name, tree in parts.items()}
    trees[f"whole {kind}" if parts else "all"] = whole
    totals = [(name, *[""] * (2 + placed), *_sizes(tree, placed)) for name, tree in trees.items()]
    texts = [first, "dtype", "shape", *["sharding"] * placed]
    numbers = ["count", "bytes", *["bytes on each device"] * placed]
    costs = "" if step is None else f"\n{_costs(step, state, batch)}"
    return sheet(texts, numbers, (leaves, totals)) + costs


def _kind(leaf: Any) -> tuple[str, str]:
    is_array = _tree.is_array(leaf)
    return (str(leaf.dtype), str(list(leaf.shape))) if is_array else (type(leaf).__name__, "-")


def _sizes(tree: PyTree, placed: bool) -> tuple[str, ...]:
    count = sum(math.prod(x.shape) for x in filter(_tree.is_array, jax.tree.leaves(tree)))
    each = [_repr.size(bytes_on_each(tree))] if placed else []
    return (f"{count:,}", _repr.size(nbytes(tree)), *each)


def _spec(leaf: Any) -> str:
    """Returns over which axes of a mesh a leaf is divided; nothing where it is on one device."""
    where = getattr(leaf, "sharding", None)
    return str(where.spec) if isinstance(where, NamedSharding) and where.mesh.size > 1 else ""


def _parts(state: Any, inputs: PyTree) -> Mapping[str, PyTree]:
    """Returns the parts of a state or a model by name, the trained one first; else nothing."""
    if hasattr(state, "stateless_call"):
        return _of_keras(state)
    names = ("params", "model_state", "opt_state")
    if all(hasattr(state, name) for name in names):
        return {name: getattr(state, name) for name in names}
    if (model := _model_of(state)) is not None:
        if inputs is None and not _is_nnx(state):
            raise ValueError(
                f"inputs: expected a batch of them, since {type(state).__name__} has no values of "
                "its own, got none. Pass inputs=x, or jax.ShapeDtypeStruct(shape, dtype)."
            )
        found = jax.eval_shape(model.init, jax.random.key(0), inputs)
        return dict(zip(names, found, strict=False))
    if jax.tree_util.all_leaves([state]) and not _tree.is_array(state):
        raise TypeError(
            "state: expected a TrainState, another pytree of arrays or a model, got "
            f"{type(state).__name__}."
        )
    return {}


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
        with guarded(step):
            return step(*args)

    found = jit(once).lower(*args).compile().cost_analysis() or {}
    flops, moved = found.get("flops", math.nan), found.get("bytes accessed", math.nan)
    return f"one step: {flops:,.0f} FLOPs, {_repr.size(moved)} of memory read and written"
