"""Maps a function of one member over all members: at once, one after another, or in blocks.

One after another, each member is computed inside a conditional. A stopped member then costs
nothing. The conditional also keeps XLA's CPU backend from fusing the slice of a member's leaves
into the loops that read them, where the unknown index prevents vectorization: 4 MNIST convnets took
1.7 times as long as in separate programs without the conditional, and take 0.98 times as long with
it.

A step must not change stopped members. Where members are computed at once, each output leaf is
replaced by the old leaf of stopped members right after the operation that computes it, and later
operations use the replaced value: Adam computes its new params from the moments that are kept. When
the leaves were replaced at the end instead, XLA kept old and new moments side by side and copied
them: 32 MNIST MLPs took 1.35 times as long as one after another, and now take 1.0 times as long.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from functrain.common import _tree
from functrain.common._checks import require_integer, require_no_problems, require_one_of
from functrain.common._platform import current_platform
from functrain.common._types import PyTree
from functrain.rewrites._equations import substitute, walk_equations
from functrain.rewrites._pass import inline

Data: TypeAlias = Literal["shared", "per_member"]
Block: TypeAlias = int | Literal["auto"] | None
Function: TypeAlias = Callable[[Any, PyTree], Any]


@dataclasses.dataclass(frozen=True)
class OverMembers:
    """A function of one member and a batch, mapped over all members.

    Attributes:
      function: The function ``(member, batch) -> result``.
      data: ``"shared"`` for one batch that all members get; ``"per_member"`` for batches with
        leaves `[N, ...]`.
      block: How many members to compute at once; None for all of them.
    """

    function: Function
    data: Data
    block: Block

    def __post_init__(self) -> None:
        require_one_of("data", self.data, get_args(Data))
        if self.block not in (None, "auto"):
            require_integer("block", self.block, advice="Pass None for all members at once.")

    def __call__(self, stacked: PyTree, batch: PyTree, active: jax.Array | None = None) -> Any:
        """Calls the function for all members.

        Args:
          stacked: The members, leaves `[N, ...]`.
          batch: One batch, or with ``data="per_member"`` leaves `[N, B, ...]`.
          active: `bool[N]`, the members whose results are used; the results of others may be
            anything. None for all members.

        Returns:
          The results, stacked.
        """
        members = jax.tree.leaves(stacked)[0].shape[0]
        is_per_member = self.data == "per_member"
        block_size = self.block_size(stacked, batch)
        if block_size is None:
            return self._call_at_once(stacked, batch)
        # Without a mask all members are computed. The comparison is not a constant for the
        # compiler, which would otherwise remove the conditional around each member.
        is_used = jnp.arange(members) >= 0 if active is None else active
        inputs = stacked, is_used, batch if is_per_member else None
        in_blocks = members - members % block_size
        function = self.function if block_size == 1 else self._call_at_once
        results = _map_blocks(function, inputs, batch, block_size, in_blocks)
        if in_blocks == members:
            return results
        # The members that do not fill a block.
        last_members, _, last_batch = jax.tree.map(lambda x: x[in_blocks:], inputs)
        last = self._call_at_once(last_members, last_batch if is_per_member else batch)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), results, last)

    def _call_at_once(self, stacked: PyTree, batch: PyTree) -> Any:
        """Calls the function for all given members at once."""
        members = jax.tree.leaves(stacked)[0].shape[0]
        is_per_member = self.data == "per_member"
        # With an axis of None all members read one batch, which is not copied for each of them.
        axes: Any = 0 if is_per_member else None
        if current_platform() == "tpu" and not is_per_member:
            axes = jax.tree.map(lambda x: 0 if _are_labels(x) else None, batch)
            batch = jax.tree.map(lambda x: _repeat_labels(x, members), batch)
        return jax.vmap(self.function, in_axes=(0, axes))(stacked, batch)

    def step_active(self, stacked: Any, batch: PyTree, active: jax.Array) -> tuple[Any, PyTree]:
        """Calls ``(member, batch) -> (member, logs)`` for all; stopped members do not change.

        Args:
          stacked: The members, leaves `[N, ...]`.
          batch: The batch, as for the function.
          active: `bool[N]`.

        Returns:
          The new members and the logs, stacked. The logs of stopped members may be anything.
        """
        block_size = self.block_size(stacked, batch)
        mapped = dataclasses.replace(self, block=block_size)
        if block_size is not None:
            new, logs = mapped(stacked, batch, active)
            return where_active(active, new, stacked), logs

        def call(stacked: Any, active: jax.Array, batch: PyTree) -> Any:
            del active  # an input of the jaxpr, which the inserted selections read
            return mapped(stacked, batch)

        closed, shapes = jax.make_jaxpr(call, return_shape=True)(stacked, active, batch)
        old_leaves = jax.tree.leaves(stacked)
        jaxpr, remaining = _select_early(closed.jaxpr, len(old_leaves))
        run: Any = core.jaxpr_as_fun(closed.replace(jaxpr=jaxpr))
        outputs = run(*old_leaves, active, *jax.tree.leaves(batch))
        for i in remaining:
            outputs[i] = where_active(active, outputs[i], old_leaves[i])
        new, logs = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
        return new, logs

    def block_size(self, stacked: PyTree, batch: PyTree) -> int | None:
        """Returns how many members to compute at once, None for all of them."""
        members = jax.tree.leaves(stacked)[0].shape[0]
        self.require_valid(batch, members)
        block = self._auto_block(stacked, batch) if self.block == "auto" else self.block
        return None if block is None or block >= members else block

    def _auto_block(self, stacked: PyTree, batch: PyTree) -> int | None:
        """Returns 1 if members have convolutions and run on a CPU, else None.

        The convolution of one member fills the CPU's caches, and those of many at once do not fit:
        vmapped, 4 MNIST convnets took 1.3 times as long as in a loop. Members with dense layers
        are faster at once.
        """
        if current_platform() != "cpu":
            return None
        first = self.take_first(stacked, batch)
        for eqn, *_ in walk_equations(jax.make_jaxpr(self.function)(*first).jaxpr):
            if eqn.primitive is primitives.conv_general_dilated_p:
                return 1
        return None

    def take_first(self, stacked: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the first member and its batch."""
        member = jax.tree.map(lambda x: x[0], stacked)
        if self.data == "per_member":
            batch = jax.tree.map(lambda x: x[0], batch)
        return member, batch

    def require_valid(self, batch: PyTree, members: int) -> None:
        """Raises ValueError if each member needs a batch, and there is none for some."""
        if self.data == "per_member":
            _require_batch_per_member(batch, members)


def _repeat_labels(x: Any, members: int) -> Any:
    """Returns `[N, B]` for a leaf `[B]` of a batch, such as labels; other leaves unchanged.

    What a TPU computes from labels that all members share, such as a comparison with each class, it
    stores by a kernel of its own before it repeats it for the members. What it computes from labels
    that are repeated is part of the kernels that use it, and the loss picks a logit as it does in
    one member. The barrier keeps the compiler from moving the repetition behind the computation. A
    step of 32 MLPs 64-32-10 takes 36,440 cycles on a v5e instead of 46,109, by the estimates of the
    compiler of jax 0.10, and 38,214 without the barrier. On an H100 nothing is saved.
    """
    if not _are_labels(x):
        return x
    return jax.lax.optimization_barrier(jnp.broadcast_to(x, (members, *x.shape)))


def _are_labels(x: Any) -> bool:
    return jnp.ndim(x) == 1 and not _tree.is_key(x)


def _map_blocks(
    function: Function, inputs: Any, batch: PyTree, block_size: int, members: int
) -> PyTree:
    """Calls a function of a block for the first `members` members, block by block.

    Args:
      function: ``(block of members, batch) -> results``.
      inputs: Members, the mask of used members, and batches of members or None, `[N, ...]` each.
      batch: The batch that all members get, if they have no batches.
      block_size: Members in a block.
      members: A multiple of `block_size`.
    """
    block_shape = () if block_size == 1 else (block_size,)
    blocks = jax.tree.map(lambda x: x[:members].reshape(-1, *block_shape, *x.shape[1:]), inputs)

    def call_block(block: Any) -> Any:
        stacked, is_used, batch_of_block = block
        block_batch = batch if batch_of_block is None else batch_of_block
        # A block without used members returns zeros, which `where_active` replaces.
        shapes = jax.eval_shape(function, stacked, block_batch)
        return jax.lax.cond(
            jnp.any(is_used),
            function,
            lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
            stacked,
            block_batch,
        )

    results = jax.lax.map(call_block, blocks)
    axes = 1 + len(block_shape)
    return jax.tree.map(lambda x: x.reshape(members, *x.shape[axes:]), results)


def _select_early(jaxpr: Any, leaves: int) -> tuple[Any, list[int]]:
    """Inserts the selection between old and new leaves right after each new leaf is computed.

    Args:
      jaxpr: Its first inputs are the old leaves, then `active`; its first outputs the new leaves.
      leaves: The number of leaves.

    Returns:
      The jaxpr, and the outputs for which nothing could be inserted: those that no operation
      computes, that are returned more than once, or that have another type than the old leaf.
    """
    new_vars, old_vars, active = jaxpr.outvars[:leaves], jaxpr.invars[:leaves], jaxpr.invars[leaves]
    counts = Counter(map(id, new_vars))
    old_of_new = {}
    for new, old in zip(new_vars, old_vars, strict=True):
        has_type = (new.aval.shape, new.aval.dtype) == (old.aval.shape, old.aval.dtype)
        if has_type and counts[id(new)] == 1:
            old_of_new[id(new)] = old
    selected: dict[Any, Any] = {}
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn.replace(invars=substitute(selected, eqn.invars)))
        for var in eqn.outvars:
            if id(var) in old_of_new:
                inputs = [active, var, old_of_new[id(var)]]
                selection, (selected[var],) = inline(_select_leaf, eqn, inputs)
                eqns += selection
    remaining = []
    for i, var in enumerate(new_vars):
        if isinstance(var, core.Literal) or var not in selected:
            remaining.append(i)
    outvars = substitute(selected, jaxpr.outvars)
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info), remaining


def _select_leaf(active: jax.Array, new: jax.Array, old: jax.Array) -> list[jax.Array]:
    return [where_active(active, new, old)]


def where_active(active: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns the new leaves of active members, and the old leaves of the others."""

    def select(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(active.reshape(-1, *[1] * (jnp.ndim(new) - 1)), new, old)

    return jax.tree.map(select, new, old)


def _require_batch_per_member(batch: PyTree, members: int) -> None:
    problems = _tree.format_leaves(batch, lambda x: jnp.shape(x)[:1] != (members,))
    expected = f"a batch for each of the {members} members, leaves [{members}, B, ...]"
    advice = "Use data='shared' for one batch that all members get."
    require_no_problems("batch", problems, expected, advice)
