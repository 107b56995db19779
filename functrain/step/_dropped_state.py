"""A warning of losses that drop the new model state."""

from collections.abc import Callable
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.model._freeze import FrozenState
from functrain.rewrites._equations import variables
from functrain.rewrites._pass import inline_calls


def warn_of_dropped_state(loss_and_logs: Callable[[PyTree], Any], model_state: PyTree) -> None:
    """Warns of a loss that computes a new model state, and returns only the loss and logs.

    A loss may leave the model state alone, as where batch statistics are frozen. One that trains
    them computes new ones, of the old shapes, which none of its results depends on.

    Args:
      loss_and_logs: ``loss_and_logs(model_state) -> (loss, logs)``.
      model_state: The model state.
    """
    inner = model_state
    while isinstance(inner, FrozenState):
        inner = inner.model
    # Frozen params stay as they are, also those of a layer whose outputs are not used.
    changing = {id(x) for x in jax.tree.leaves(inner)}
    if not changing:
        return
    jaxpr = inline_calls(jax.make_jaxpr(lambda state: loss_and_logs(state))(model_state)).jaxpr
    unused = _unused_updates(jaxpr)
    pairs = zip(_tree.leaves_with_path(model_state), jaxpr.invars, strict=True)
    dropped = [path for (path, x), var in pairs if id(x) in changing and var in unused]
    if dropped:
        warn(
            f"loss_fn: expected the new model_state from it, got a dict of logs. The new values of "
            f"{', '.join(dropped[:3])}{', ...' if dropped[3:] else ''} are dropped. Write: output "
            "= model.apply(...); return loss, functrain.Aux(output.model_state, logs=logs). To "
            "keep the old values: functrain.Aux(model_state, logs=logs)."
        )


def _unused_updates(jaxpr: Any) -> set[Any]:
    """Returns the variables from which an unused value of the same shape and dtype is computed."""
    used, unused = set(variables(jaxpr.outvars)), set[Any]()
    for eqn in reversed(jaxpr.eqns):
        inputs = variables(eqn.invars)
        if eqn.effects or used.intersection(eqn.outvars):
            used.update(inputs)
        else:
            shapes = [var.aval for var in eqn.outvars]
            unused.update(var for var in inputs if var.aval in shapes)
    return unused
