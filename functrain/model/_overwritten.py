"""Values in a model state whose gradient is their new value: the scales of float8 products."""

from collections.abc import Iterable
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._types import PyTree


@jax.tree_util.register_pytree_with_keys_class
class OverwrittenByGradient(dict[str, Any]):
    """A part of a model state that a step replaces by its gradient.

    A product in float8 divides its inputs by scales, and computes the next scales from the largest
    values that it meets, in the backward pass those of the gradients. Its custom derivative returns
    the new scales in place of gradients. No optimizer may change them.
    """

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """Returns the children with their keys, and the keys."""
        keys = tuple(sorted(self))
        return [(jax.tree_util.DictKey(key), self[key]) for key in keys], keys

    @classmethod
    def tree_unflatten(
        cls, keys: tuple[str, ...], children: Iterable[Any]
    ) -> "OverwrittenByGradient":
        """Returns the node with other children."""
        return cls(zip(keys, children, strict=True))


def split_overwritten(model_state: PyTree) -> tuple[list[OverwrittenByGradient], PyTree]:
    """Returns the parts that gradients overwrite, and the rest, with empty parts in their place."""
    parts = _tree.nodes(model_state, OverwrittenByGradient)
    return parts, join_overwritten(model_state, [OverwrittenByGradient()] * len(parts))


def join_overwritten(model_state: PyTree, parts: Iterable[OverwrittenByGradient]) -> PyTree:
    """Returns a model state with other parts in the place of those that gradients overwrite.

    Raises:
      ValueError: The model state has another number of such parts.
    """
    parts = list(parts)
    if not parts:
        return model_state
    places = len(_tree.nodes(model_state, OverwrittenByGradient))
    if places != len(parts):
        raise ValueError(
            f"loss_fn: expected Aux(model_state) with {len(parts)} parts of float8 scales, as in "
            f"the model_state that it was called with, got {places}. Return the model_state of "
            "the model's output."
        )
    remaining = iter(parts)
    return jax.tree.map(
        lambda x: next(remaining) if _is_overwritten(x) else x, model_state, is_leaf=_is_overwritten
    )


def _is_overwritten(x: PyTree) -> bool:
    return isinstance(x, OverwrittenByGradient)
