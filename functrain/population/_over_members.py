"""A function of one member as one of all."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._checks import is_whole
from functrain.common._types import PyTree

Data: TypeAlias = Literal["shared", "own"]


def over_members(
    function: Callable[[Any, PyTree], Any], stacked: PyTree, batch: PyTree, data: Data, block: Any
) -> Any:
    """Calls ``function(member, batch)`` for all members.

    Args:
      function: Of one member.
      stacked: Leaves `[N, ...]`.
      batch: One for all, or with ``"own"`` leaves `[N, ...]`.
      data: Which of these.
      block: How many at once; None for all of them.

    Returns:
      What it returns, stacked.
    """
    members = jax.tree.leaves(stacked)[0].shape[0]
    if data == "own":
        _require_own(batch, members)
    if block is None or block >= members:
        return jax.vmap(function, in_axes=(0, 0 if data == "own" else None))(stacked, batch)
    size = None if block == 1 else block  # one at a time: not vmapped at all
    if data == "own":
        return jax.lax.map(lambda both: function(*both), (stacked, batch), batch_size=size)
    return jax.lax.map(lambda member: function(member, batch), stacked, batch_size=size)


def where_active(active: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns of each member the new leaves if it is active, else the old ones."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(active.reshape(-1, *[1] * (jnp.ndim(new) - 1)), new, old)

    return jax.tree.map(choose, new, old)


def require_data(data: Any) -> None:
    """Refuses what says not whose data they are."""
    if data not in get_args(Data):
        raise ValueError(
            "data: expected 'shared', one batch for all members, or 'own', leaves [N, B, ...], "
            f"got {data!r}"
        )


def require_block(block: Any) -> None:
    """Refuses what is no number of members."""
    if block is not None and not is_whole(block, 1):
        raise ValueError(
            f"block: expected None for all members at once, or a whole number from 1 on, got "
            f"{block!r}"
        )


def _require_own(batch: PyTree, members: int) -> None:
    wrong = [
        f"{path}: {_tree.spec(x)}"
        for path, x in _tree.leaves_with_path(batch)
        if not jnp.shape(x) or jnp.shape(x)[0] != members
    ]
    if wrong:
        raise ValueError(
            f"batch: expected a batch for each of the {members} members, leaves [{members}, B, "
            f"...], got\n{_tree.bullets(wrong)}\nFor one batch that all of them see, "
            "functrain.population.step(step, data='shared')."
        )
