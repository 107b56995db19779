"""The leaves of a state that a warm start takes, by the patterns that it is asked for."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from functrain.checkpoint import _leaves
from functrain.checkpoint._manifest import STATE
from functrain.checkpoint._rename import Rename, Source, find_sources
from functrain.common import _patterns, _tree
from functrain.common._checks import require
from functrain.common._types import PyTree
from functrain.model._freeze import merged_paths
from functrain.step._state import TrainState


class Selection(NamedTuple):
    """The leaves of a state, and which of them to take.

    Attributes:
      leaves: All leaves of the state by path.
      merged_paths: Of each leaf, the path in the model without `freeze` and `lora`.
      requested: Paths of the leaves to take, in the order of the state.
      skipped: Paths of the leaves not to take.
      copies: Paths of leaves of a training that are copies of params, each with that of its param.
      take: The patterns of the leaves to take; () if there are none.
      skip: The patterns of the leaves not to take.
    """

    leaves: Mapping[str, Any]
    merged_paths: Mapping[str, str]
    requested: Sequence[str]
    skipped: Collection[str]
    copies: Mapping[str, str]
    take: Sequence[str]
    skip: Sequence[str]


def select(state: PyTree, take: str | Sequence[str] | None, skip: str | Sequence[str]) -> Selection:
    """Returns the leaves that `warm_start` is asked to take; see its arguments."""
    leaves = _state_leaves(state)
    take_patterns = () if take is None else _patterns.as_patterns("take", take)
    skip_patterns = _patterns.as_patterns("skip", skip)
    merged = merged_paths(leaves, with_lora=True)
    of_training, copies = _training_leaves(state, leaves)
    skipped = _matching(skip_patterns, merged)
    matched = leaves.keys() - of_training if take is None else _matching(take_patterns, merged)
    requested = [path for path in leaves if path in matched - skipped]
    return Selection(leaves, merged, requested, skipped, copies, take_patterns, skip_patterns)


def _matching(patterns: Sequence[str], merged: Mapping[str, str]) -> set[str]:
    """Returns the paths of leaves that a pattern matches under one of their two paths."""
    return {
        path
        for path, merged_path in merged.items()
        if any(_patterns.any_matches(patterns, x) for x in (path, merged_path))
    }


def all_sources(
    selection: Selection,
    file: str,
    names: Collection[str],
    rename: Callable[[str], str] | Sequence[Rename] | None,
) -> dict[str, Source]:
    """Returns the sources of all leaves in a file by path, whether they are requested or not.

    Raises:
      CheckpointMismatchError: The file has some of the arrays that a rule joins, but not all.
      ValueError: A leaf has two sources, or a pattern matches no path.
    """
    sources = _add_merged_paths(find_sources(file, names, rename), selection.merged_paths)
    paths = dict.fromkeys([*selection.leaves, *selection.merged_paths.values()])
    for pattern in selection.skip:  # of a leaf that the file or the state may lack
        _patterns.require_match("skip", pattern, {*paths, *sources})
    for pattern in selection.take:
        _patterns.require_match("take", pattern, paths)
    return sources


def _add_merged_paths(
    sources: Mapping[str, Source], merged: Mapping[str, str]
) -> dict[str, Source]:
    """Adds leaves whose paths differ only because a model is frozen, in the file or the state."""
    # An exact match has precedence over one by the merged path.
    by_merged = {path: sources[name] for name, path in merged_paths(sources).items()}
    by_leaf = {path: by_merged[other] for path, other in merged.items() if other in by_merged}
    return {**by_leaf, **by_merged, **sources}


def _state_leaves(state: PyTree) -> dict[str, Any]:
    """Returns the leaves of a state by path; raises TypeError unless all are arrays."""
    leaves = _leaves.named_leaves({STATE: state})
    not_arrays = [leaf for leaf in leaves.values() if not _tree.is_array(leaf)]
    advice = "The order is warm_start(state, source); of a Keras model: bridge.create_state."
    require(not not_arrays, "state", "arrays", not_arrays[:1], advice, error=TypeError)
    return {_leaves.leaf_path(name): leaf for name, leaf in leaves.items()}


def _training_leaves(state: PyTree, leaves: Mapping[str, Any]) -> tuple[set[str], dict[str, str]]:
    """Returns the paths of leaves that belong to a training: all of a TrainState but its model.

    Also returns those of them that are copies of params, each with the path of its param.
    Optimizers keep some, and fields that a subclass of TrainState adds may.
    """
    paths = jax.tree.unflatten(jax.tree.structure(state), leaves)
    of_training, copies = set[str](), dict[str, str]()
    for train_state in _tree.nodes(paths, TrainState):
        structure = _tree.structure(train_state.params)

        def mirrors(node: Any, structure: Any = structure) -> bool:
            return bool(_tree.structure(node) == structure)

        others = train_state.replace(params=None, model_state=None)
        of_training.update(jax.tree.leaves(others))
        for node in filter(mirrors, jax.tree.leaves(others, is_leaf=mirrors)):
            pairs = dict(zip(*map(jax.tree.leaves, (node, train_state.params)), strict=True))
            are_equal = all(_is_copy(leaves[a], leaves[b]) for a, b in pairs.items())
            # Moments start with zeros, as many biases do.
            if are_equal and any(jnp.any(leaves[path] != 0) for path in pairs):
                copies |= pairs
    return of_training, copies


def _is_copy(leaf: Any, param: Any) -> bool:
    """Returns True if a leaf has the values of a param in its own dtype."""
    have_values = all(_tree.is_concrete(x) and not _tree.is_deleted(x) for x in (leaf, param))
    if not have_values or leaf.shape != param.shape or _tree.is_key(leaf):
        return False
    return bool(jnp.array_equal(leaf, _tree.device_put_like(param.astype(leaf.dtype), leaf)))
