"""All members at once, one after another, or in blocks: measured."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from functrain.common._checks import require
from functrain.common._types import PyTree, Step, traits_of
from functrain.engine._fuse import fuse
from functrain.engine._plan import auto_steps, nbytes
from functrain.inspect._autotune import Candidate, measured
from functrain.population._over_members import Data
from functrain.population._state import PopulationState, require_population
from functrain.population._step import step as step_of_all
from functrain.rewrites import Mode

MOST_STEPS = 16  # in a program that is measured


class BlockTuning(NamedTuple):
    """What `autotune` found; prints as a table.

    Attributes:
      block: The choice, for ``functrain.population.step(step, block=...)``.
      microseconds: Per step of one member, by block; None is all members at once.

    Examples:
      >>> print(BlockTuning(None, {None: 3.5, 1: 14.25}))
      members at once  µs a member-step
                  all*              3.5
                    1              14.2
    """

    block: int | None
    microseconds: dict[int | None, float]

    def __str__(self) -> str:
        """Returns the table; a star marks the choice."""
        lines = ["members at once  µs a member-step"]
        for block, taken in self.microseconds.items():
            name = "all" if block is None else str(block)
            mark = "*" if block == self.block else " "
            lines.append(f"{name:>15}{mark}{taken:>17.1f}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def autotune(
    population: PopulationState,
    step: Step[Any],
    batch: PyTree,
    *,
    blocks: Sequence[int | None] = (None, 1, 4),
    data: Data = "shared",
    seconds: float = 60.0,
    rewrites: Mode = "auto",
) -> BlockTuning:
    """Measures how many members to compute at once, and chooses the fastest.

    `jax.vmap` over members wins where a member's operations are small: dense layers of some
    hundred units. One after another wins where each fills the machine by itself. It costs a
    compilation for each way, and some half a second of steps. Nothing is consumed, and the steps
    that are taken are forgotten.

    Args:
      population: The population to start from.
      step: That of one member, as for `functrain.population.step`.
      batch: One batch, of full size.
      blocks: What to try: None for all at once, 1 for one after another, or numbers in between.
      data: As for `functrain.population.step`.
      seconds: After so much time no further way is tried. The first is always measured.
      rewrites: As for `functrain.fuse`.

    Returns:
      The choice, and what was measured.

    Raises:
      ValueError: `blocks` is empty, or holds what is no number of members.
      TypeError: As `functrain.population.step`.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> def step(state, batch):
      ...     return state + jnp.mean(batch), {}
      >>> population = ft.population.stack([jnp.zeros(())] * 4)
      >>> tuning = autotune(population, step, jnp.ones(8), blocks=(None, 1))
      >>> over_all = ft.population.step(step, block=tuning.block)
    """
    require_population(population, "population")
    ways = {block: step_of_all(step, data=data, block=block) for block in blocks}
    require(ways, "blocks", "at least one way", blocks)
    k = min(MOST_STEPS, auto_steps(nbytes(batch), nbytes(population)))
    chunk = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * k), batch)
    began = time.perf_counter()
    candidates: dict[int | None, Candidate] = {}
    for block, over_all in ways.items():
        if candidates and time.perf_counter() - began > seconds:
            break
        carry = traits_of(over_all).wrap_state(population)
        fused = fuse(over_all, k, rewrites=rewrites)
        candidates[block] = Candidate(k, fused, carry, chunk)
    rows = zip(candidates, measured(list(candidates.values())), strict=True)
    taken = {block: row.microseconds / len(population) for block, row in rows}
    return BlockTuning(min(taken, key=lambda block: taken[block]), taken)
