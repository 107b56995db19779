"""Trees in two parts, each of which has None in place of what the other has."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from functrain.common import _patterns, _tree
from functrain.common._types import PyTree


def split(tree: PyTree, condition: Callable[[str], bool]) -> tuple[PyTree, PyTree]:
    """Returns the leaves whose paths meet a condition, and the others.

    None is an empty subtree for jax, so that gradients and optimizers skip it.
    """

    def select(is_first: bool) -> PyTree:
        def keep(path: Any, leaf: PyTree) -> PyTree:
            return leaf if condition(_tree.path_str(path)) is is_first else None

        return jax.tree_util.tree_map_with_path(keep, tree)

    return select(True), select(False)


def split_by_patterns(tree: PyTree, name: str, patterns: Sequence[str]) -> tuple[PyTree, PyTree]:
    """Returns the leaves whose paths match a pattern, and the others.

    Args:
      tree: A tree.
      name: The name of the argument that has the patterns.
      patterns: The patterns, each of which has to match a path.
    """
    paths = list(dict(_tree.leaves_with_path(tree)))
    for pattern in patterns:
        _patterns.require_match(name, pattern, paths)
    return split(tree, lambda path: _patterns.any_matches(patterns, path))


def join(
    first: PyTree,
    second: PyTree,
    combine: Callable[[Any, Any], Any] = lambda first, second: first,
    *kinds: type,
) -> PyTree:
    """Returns the leaves of two trees, by default those of the first where both have one.

    Args:
      first: A tree.
      second: Another one, which may have subtrees in place of the leaves of the first.
      combine: ``combine(first, second)`` for a leaf that both have.
      *kinds: Further classes of leaves of `first`.
    """

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, kinds)

    def join_leaves(x: Any, y: Any) -> Any:
        if x is None:
            return y
        return x if y is None else combine(x, y)

    return jax.tree.map(join_leaves, first, second, is_leaf=is_leaf)


def split_scales(model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the float8 scales of a model state, and the rest.

    A product in float8 divides its inputs by scales, and computes the next scales from the largest
    values that it meets, in the backward pass those of the gradients. Its custom derivative returns
    the new scales in place of gradients. No optimizer may change them. They are in the collection
    that flax reserves for such values, which models of `bridge` have, too.
    """
    return split(model_state, lambda path: OVERWRITE_WITH_GRADIENT in path.split("/"))
