"""Values in a model state whose gradient is their new value: the scales of float8 products."""

from collections.abc import Iterable
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree


class OverwrittenByGradient(dict[str, Any]):
    """A part of a model state that a step replaces by its gradient.

    A product in float8 divides its inputs by scales, and computes the next scales from the largest
    values that it meets, in the backward pass those of the gradients. Its custom derivative returns
    the new scales in place of gradients. No optimizer may change them.
    """


def _flatten_with_keys(part: OverwrittenByGradient) -> tuple[list[tuple[Any, Any]], Any]:
    keys = tuple(sorted(part))
    return [(jax.tree_util.DictKey(key), part[key]) for key in keys], keys


jax.tree_util.register_pytree_with_keys(
    OverwrittenByGradient,
    _flatten_with_keys,
    lambda keys, children: OverwrittenByGradient(zip(keys, children, strict=True)),
)


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
    expected = f"a model_state with {len(parts)} parts of float8 scales, as the loss was given"
    require(places == len(parts), "Aux", expected, places, "Return that of the model's output.")
    remaining = iter(parts)
    return jax.tree.map(
        lambda x: next(remaining) if _is_overwritten(x) else x, model_state, is_leaf=_is_overwritten
    )


def _is_overwritten(x: PyTree) -> bool:
    return isinstance(x, OverwrittenByGradient)
