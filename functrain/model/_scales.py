"""Float8 scales in a model state: values whose gradient is their new value."""

from typing import Any

import jax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from functrain.common import _tree
from functrain.common._types import PyTree


def split_scales(model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the float8 scales of a model state, and the rest, each with None for the other.

    A product in float8 divides its inputs by scales, and computes the next scales from the largest
    values that it meets, in the backward pass those of the gradients. Its custom derivative returns
    the new scales in place of gradients. No optimizer may change them. They are in the collection
    that flax reserves for such values, which models of `bridge` have, too.
    """

    def select(are_scales: bool) -> PyTree:
        def keep(path: Any, x: Any) -> Any:
            return x if (OVERWRITE_WITH_GRADIENT in _tree.keys(path)) is are_scales else None

        return jax.tree_util.tree_map_with_path(keep, model_state)

    return select(True), select(False)


def join_scales(model_state: PyTree, scales: PyTree) -> PyTree:
    """Returns a model state with the scales of another one of the same structure."""
    return jax.tree.map(
        lambda x, scale: x if scale is None else scale,
        model_state,
        scales,
        is_leaf=lambda x: x is None,
    )
