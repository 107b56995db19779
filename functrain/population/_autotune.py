"""Measures how many members to compute at once."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from functrain.common._checks import require
from functrain.common._types import PyTree, Step, traits_of
from functrain.engine._fuse import fuse
from functrain.engine._plan import auto_steps, nbytes
from functrain.inspect._autotune import Candidate, measure
from functrain.population._over_members import Data
from functrain.population._state import PopulationState, require_population
from functrain.population._step import step as population_step
from functrain.rewrites import Mode
from functrain.targets._chips import accelerator_of

# The largest number of steps in a program that is measured, which bounds the time of one run.
MAX_STEPS = 16


class BlockTuning(NamedTuple):
    """The result of `autotune`; prints as a table.

    Attributes:
      block: The choice, for ``functrain.population.step(step, block=...)``.
      microseconds: Time per member and step, by block; None is all members at once.

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
        for block, microseconds in self.microseconds.items():
            name = "all" if block is None else str(block)
            mark = "*" if block == self.block else " "
            lines.append(f"{name:>15}{mark}{microseconds:>17.1f}")
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

    `jax.vmap` over members is faster if a member's operations are small, such as dense layers with
    a few hundred units. One after another is faster if each member uses the whole machine. Each
    alternative costs a compilation and about half a second of steps. The population is copied, so
    it is neither consumed nor changed.

    Args:
      population: The population to start from.
      step: The step of one member, as for `functrain.population.step`.
      batch: One batch, of full size.
      blocks: The alternatives: None for all at once, 1 for one after another, or numbers in
        between.
      data: As for `functrain.population.step`.
      seconds: No further alternative is tried after this time. The first is always measured.
      rewrites: As for `functrain.fuse`.

    Returns:
      The choice and the measurements.

    Raises:
      ValueError: `blocks` is empty, or holds something other than None and numbers from 1.
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
    advice = "For one number, write blocks=(4,)."
    is_sequence = isinstance(blocks, Sequence)
    require(is_sequence, "blocks", "a sequence of numbers of members", blocks, advice)
    steps = {block: population_step(step, data=data, block=block) for block in blocks}
    require(steps, "blocks", "at least one number of members", blocks)
    chip = accelerator_of(population)
    k = min(MAX_STEPS, auto_steps(nbytes(batch), nbytes(population), chip=chip))
    # The steps that are measured repeat one batch: their time does not depend on its values.
    chunk = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * k), batch)
    start_time = time.perf_counter()
    candidates: dict[int | None, Candidate] = {}
    for block, step_of_all in steps.items():
        if candidates and time.perf_counter() - start_time > seconds:
            break
        carry = traits_of(step_of_all).wrap_state(population)
        fused = fuse(step_of_all, k, rewrites=rewrites)
        candidates[block] = Candidate(k, fused, carry, chunk)
    # All alternatives are measured in turns, so that a slow moment of the machine affects each.
    rows = zip(candidates, measure(list(candidates.values())), strict=True)
    microseconds = {block: row.microseconds / len(population) for block, row in rows}
    fastest = min(microseconds, key=lambda block: microseconds[block])
    return BlockTuning(fastest, microseconds)
