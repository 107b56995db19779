"""A function of one member as one of all: at once, one after another, or in blocks.

A loop over members is a loop of conditionals, each around a whole member: one that is stopped costs
nothing, and XLA's CPU backend cannot fuse the slice of a member's leaves into the loops that read
them, where an index that it does not know keeps it from vectorizing: 4 MNIST convnets took 1.7
times as long as one after another in programs of their own, and take 0.98 times so.

A step leaves members that are stopped as they are. Of members that are computed at once, each leaf
is chosen where it is made, and what is computed from it takes the chosen one: Adam makes its new
params of the moments that are kept. Chosen at the end, XLA keeps old and new moments side by side
and copies them: 32 MNIST MLPs took 1.35 times as long as one after another, and take 1.0 times so.
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
from functrain.common._types import PyTree
from functrain.rewrites._frame import equations, inlined, read

Data: TypeAlias = Literal["shared", "per_member"]
Block: TypeAlias = int | Literal["auto"] | None
Function: TypeAlias = Callable[[Any, PyTree], Any]


@dataclasses.dataclass(frozen=True)
class OverMembers:
    """A function ``(member, batch)`` of one member as one of all of them.

    Attributes:
      function: Of one member.
      data: Whether there is one batch for all, or with ``"per_member"`` leaves `[N, ...]`.
      block: How many members at once; None for all of them.
    """

    function: Function
    data: Data
    block: Block

    def __post_init__(self) -> None:
        require_one_of("data", self.data, get_args(Data))
        if self.block not in (None, "auto"):
            require_integer("block", self.block, advice="None is all members at once.")

    def __call__(self, stacked: PyTree, batch: PyTree, active: jax.Array | None = None) -> Any:
        """Calls the function for all members.

        Args:
          stacked: Leaves `[N, ...]`.
          batch: As `data` says.
          active: `bool[N]`, whose results are wanted; of others there may be anything. None for
            all.

        Returns:
          What it returns, stacked.
        """
        members = jax.tree.leaves(stacked)[0].shape[0]
        own = self.data == "per_member"
        size = self.size(stacked, batch)
        of_all = jax.vmap(self.function, in_axes=(0, 0 if own else None))
        if size is None:
            return of_all(stacked, batch)
        # A number that the compiler does not know to be 0.
        wanted = jnp.arange(members) >= 0 if active is None else active
        xs = stacked, wanted, batch if own else None
        whole = members - members % size
        done = _in_blocks(self.function if size == 1 else of_all, xs, batch, size, whole)
        if whole == members:
            return done
        rest, _, rest_batch = jax.tree.map(lambda x: x[whole:], xs)
        last = of_all(rest, rest_batch if own else batch)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), done, last)

    def step_active(self, stacked: Any, batch: PyTree, active: jax.Array) -> tuple[Any, PyTree]:
        """Calls ``(member, batch) -> (member, logs)`` for all; the stopped stay as they are.

        Args:
          stacked: Leaves `[N, ...]`.
          batch: As for the function.
          active: `bool[N]`.

        Returns:
          Both, stacked. What is logged of members that are stopped may be anything.
        """
        size = self.size(stacked, batch)
        settled = dataclasses.replace(self, block=size)
        if size is not None:
            new, logs = settled(stacked, batch, active)
            return where_active(active, new, stacked), logs

        def staged(stacked: Any, active: jax.Array, batch: PyTree) -> Any:
            del active  # an input, to choose by
            return settled(stacked, batch)

        closed, shapes = jax.make_jaxpr(staged, return_shape=True)(stacked, active, batch)
        old = jax.tree.leaves(stacked)
        jaxpr, left = _chosen_where_made(closed.jaxpr, len(old))
        run: Any = core.jaxpr_as_fun(closed.replace(jaxpr=jaxpr))
        outs = run(*old, active, *jax.tree.leaves(batch))
        for i in left:
            outs[i] = where_active(active, outs[i], old[i])
        new, logs = jax.tree.unflatten(jax.tree.structure(shapes), outs)
        return new, logs

    def size(self, stacked: PyTree, batch: PyTree) -> int | None:
        """Returns how many members to compute at once, None for all; "auto" goes by what one does.

        On CPU a convolution of a member fills the caches, as many at once do not: vmapped, 4 MNIST
        convnets took 1.3 times as long as in a loop. Dense members are the faster for it.
        """
        members = jax.tree.leaves(stacked)[0].shape[0]
        if self.data == "per_member":
            _require_own(batch, members)
        block = self._by_what_it_does(stacked, batch) if self.block == "auto" else self.block
        return None if block is None or block >= members else block

    def _by_what_it_does(self, stacked: PyTree, batch: PyTree) -> int | None:
        if jax.default_backend() != "cpu":
            return None
        first = jax.tree.map(lambda x: x[0], stacked)
        shown = jax.tree.map(lambda x: x[0], batch) if self.data == "per_member" else batch
        found = equations(jax.make_jaxpr(self.function)(first, shown).jaxpr)
        convolves = any(eqn.primitive is primitives.conv_general_dilated_p for eqn, *_ in found)
        return 1 if convolves else None


def _in_blocks(function: Function, xs: Any, batch: PyTree, size: int, whole: int) -> PyTree:
    """Calls a function of a block for the first members, block by block."""
    inner = () if size == 1 else (size,)
    blocks = jax.tree.map(lambda x: x[:whole].reshape(-1, *inner, *x.shape[1:]), xs)

    def of_block(block: Any) -> Any:
        stacked, wanted, own = block
        shown = batch if own is None else own
        shapes = jax.eval_shape(function, stacked, shown)
        return jax.lax.cond(
            jnp.any(wanted),
            function,
            lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
            stacked,
            shown,
        )

    found = jax.lax.map(of_block, blocks)
    return jax.tree.map(lambda x: x.reshape(whole, *x.shape[1 + len(inner) :]), found)


def _chosen_where_made(jaxpr: Any, leaves: int) -> tuple[Any, list[int]]:
    """Returns the jaxpr with its first outputs chosen where they are made, and which are not.

    Chosen are those that it makes, for one leaf alone, in the leaf's type.
    """
    outs, olds, active = jaxpr.outvars[:leaves], jaxpr.invars[:leaves], jaxpr.invars[leaves]
    times = Counter(map(id, outs))
    old = {
        id(out): before
        for out, before in zip(outs, olds, strict=True)
        if times[id(out)] == 1
        and (out.aval.shape, out.aval.dtype) == (before.aval.shape, before.aval.dtype)
    }
    env: dict[Any, Any] = {}
    eqns: list[core.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn.replace(invars=read(env, eqn.invars)))
        for out in eqn.outvars:
            if id(out) in old:
                chosen, (env[out],) = inlined(_choose, eqn, [active, out, old[id(out)]])
                eqns += chosen
    left = [i for i, out in enumerate(outs) if isinstance(out, core.Literal) or out not in env]
    outvars = read(env, jaxpr.outvars)
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info), left


def _choose(active: jax.Array, new: jax.Array, old: jax.Array) -> list[jax.Array]:
    return [where_active(active, new, old)]


def where_active(active: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns of each member the new leaves if it is active, else the old ones."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(active.reshape(-1, *[1] * (jnp.ndim(new) - 1)), new, old)

    return jax.tree.map(choose, new, old)


def _require_own(batch: PyTree, members: int) -> None:
    wrong = _tree.format_leaves(batch, lambda x: jnp.shape(x)[:1] != (members,))
    expected = f"a batch for each of the {members} members, leaves [{members}, B, ...]"
    require_no_problems("batch", wrong, expected, "One batch for all of them is data='shared'.")
