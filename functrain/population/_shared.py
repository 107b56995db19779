"""Leaves that all members of a population share, such as a frozen base under their adapters."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from functrain.common import _tree
from functrain.common._checks import require_no_problems
from functrain.common._types import PyTree
from functrain.metrics._metric import Metered
from functrain.model import _split
from functrain.model._split import split_by_patterns
from functrain.rewrites._equations import find_producer, is_entered


def split_states(
    states: Iterable[PyTree], patterns: Sequence[str]
) -> tuple[list[PyTree], PyTree | None]:
    """Returns the states with None in place of shared leaves, and those leaves in such a tree.

    Args:
      states: The members, taken one at a time, so that only two of them have all leaves at once.
      patterns: Patterns of the paths of shared leaves.

    Raises:
      ValueError: A pattern matches no leaf, or shared leaves differ between members.
    """
    if not patterns:
        return list(states), None
    own: list[PyTree] = []
    shared: PyTree = None
    for i, state in enumerate(states):
        shared_leaves, own_leaves = split_by_patterns(state, "shared", patterns)
        if i == 0:
            shared = shared_leaves
        _require_equal(shared, shared_leaves, i)
        own.append(own_leaves)
    return own, shared


def join(own: PyTree, shared: PyTree | None) -> PyTree:
    """Returns a state with its own leaves and the shared ones."""
    return own if shared is None else _split.join(shared, own)


def _split_like(state: PyTree, shared: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the leaves of a state that are shared, and its own."""
    paths = dict(_tree.leaves_with_path(shared))
    return _split.split(state, paths.__contains__)


def map_state(function: Callable[[PyTree], PyTree], carry: PyTree) -> PyTree:
    """Returns a state, or a state with metrics, with the function applied to the state."""
    if isinstance(carry, Metered):
        return Metered(function(carry.state), carry.metrics)
    return function(carry)


def joined_step(step: Callable[..., Any], shared: PyTree | None) -> Callable[..., Any]:
    """Returns the step of a member, for states, with or without metrics, that lack shared leaves.

    The shared leaves of the state that it returns are dropped, since a step does not change them.
    """
    if shared is None:
        return step

    def call(carry: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        new, logs = step(map_state(lambda own: join(own, shared), carry), batch)
        return map_state(lambda state: _split_like(state, shared)[1], new), logs

    return call


def require_unchanged(step: Callable[..., Any], carry: PyTree, batch: PyTree, shared: Any) -> None:
    """Raises ValueError if the step of a member computes new values for shared leaves.

    Args:
      step: ``(carry, batch) -> (carry, logs)``.
      carry: The carry of a member, without shared leaves.
      batch: The batch of a member.
      shared: The shared leaves.
    """

    def step_shared(shared: PyTree) -> PyTree:
        new, _ = step(map_state(lambda own: join(own, shared), carry), batch)
        state = new.state if isinstance(new, Metered) else new
        return _split_like(state, shared)[0]

    jaxpr = jax.make_jaxpr(step_shared)(shared).jaxpr
    paths = [path for path, _ in _tree.leaves_with_path(shared)]
    pairs = zip(paths, jaxpr.outvars, strict=True)
    changed = [path for path, atom in pairs if _is_computed(atom, jaxpr)]
    advice = (
        "Each member trains its params. functrain.lora(model, ...) and freeze(model, ...) "
        'move the others into model_state: shared="model_state/frozen/**".'
    )
    require_no_problems("shared", changed, "leaves that a step does not change", advice)


def _is_computed(atom: Any, jaxpr: core.Jaxpr) -> bool:
    """Returns True if an operation computes a variable, and False if it is known to be passed on.

    Loops and conditionals pass on what their bodies do.
    """
    eqn = find_producer(atom, jaxpr)
    if eqn is None:
        return False
    if not is_entered(eqn):
        return True
    i = next(i for i, var in enumerate(eqn.outvars) if var is atom)
    for inner in core.jaxprs_in_params(eqn.params):
        inner = getattr(inner, "jaxpr", inner)
        # The condition of a loop has one output, and no other.
        if len(inner.outvars) == len(eqn.outvars) and _is_computed(inner.outvars[i], inner):
            return True
    return False


def _require_equal(expected: PyTree, got: PyTree, member: int) -> None:
    """Raises ValueError unless a member has the shared leaves of the first one, bit for bit."""
    lines = _tree.differences(expected, got)
    if not lines:
        leaves = zip(_tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True)
        lines = [path for (path, a), b in leaves if not _are_equal(a, b)]
    name = f"the leaves of member 0 in member {member}"
    advice = "Create what members share once, outside of make_state, and not from a member's key."
    require_no_problems("shared", lines, name, advice)


def _are_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if _tree.is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return bool(jnp.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact)))
