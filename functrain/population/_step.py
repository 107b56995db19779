"""The step of a population."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _repr, _tree
from functrain.common._checks import require
from functrain.common._types import PyTree, Step, StepTraits, traits_of
from functrain.engine._plan import nbytes
from functrain.metrics._metric import Metered
from functrain.population._blocks import Run, copy_onto_chip, count_blocks, run_blocks
from functrain.population._loader import Loader
from functrain.population._over_members import Block, Data, OverMembers
from functrain.population._shared import joined_step, map_state, require_unchanged
from functrain.population._state import PopulationState, require_population
from functrain.population._stopped import step_active, where_active
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep


def step(
    step: Step[Any],
    *,
    data: Data = "shared",
    block: Block = "auto",
    stop_non_finite: bool = False,
) -> Step[Any]:
    """Returns the step of a population, which takes the step of one member with all of them.

    It is a step like any other: `fuse`, `run`, `fit` and `evaluate` accept it. Its logs and metrics
    have one value for each member: `[N]` for a step, `[steps, N]` in the history, and in files a
    column or tag for each member, ``loss/0``, ``loss/1``, ... The floating-point logs of stopped
    members are NaN.

    The values of a member are those it would have alone, except for the last bits where the
    compiler orders sums differently for many members. On CPU, they do not depend on how steps are
    fused.

    Args:
      step: The step of one member, ``(state, batch) -> (state, logs)``: from `train_step` with or
        without metrics, from `eval_step`, or one that you wrote.
      data: ``"shared"``: all members get each batch. ``"per_member"``: the leaves of a batch are
        `[N, B, ...]`, one part for each member.
      block: How many members to compute at once. None: all of them, by `jax.vmap`. 1: one after
        another in the same program, where stopped members cost nothing. Other numbers: blocks of
        that many members. ``"auto"``: 1 on CPU if members have convolutions, else None.
      stop_non_finite: Stop a member for good if a loss (a log whose name ends with ``loss``) or its
        state would not be finite after a step; it keeps the state from before that step.

    Returns:
      A step of a `PopulationState`, with metrics if `step` has metrics.

    Raises:
      TypeError: `step` is not a step; or (when traced) the state is not a population.
      ValueError: `data` or `block` is not one of those; or (when traced) the batch does not have
        a part for each member.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, optax
      >>> def loss_fn(params, model_state, batch, *, rng, training):
      ...     return jnp.mean((batch * params["w"] - 1) ** 2), ft.Aux(model_state)
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
      >>> state = ft.TrainState.create(params={"w": jnp.zeros(())}, tx=tx)
      >>> rates = {"learning_rate": [0.1, 0.2, 0.5]}
      >>> population = ft.population.with_hyperparameters(ft.population.stack([state] * 3), rates)
      >>> over_all = ft.population.step(ft.train_step(loss_fn, tx))
      >>> population, logs = over_all(population, jnp.ones(8))
      >>> print(logs["loss"], population.states.params["w"])
      [1. 1. 1.] [0.2 0.4 1. ]
    """
    check_step(step)
    # A population of populations would have two axes of members, which no log or file knows.
    is_of_member = not traits_of(step).is_population
    require(is_of_member, "step", "the step of one member", step, error=TypeError)
    options: Any = {"member": step, "over": OverMembers(data, block)}
    options["stop_non_finite"] = stop_non_finite
    # The first axis of a batch may be that of the members.
    options["example_axis"] = int(data == "per_member")
    if isinstance(step, MeteredStep):
        return MeteredPopulationStep(step.base, step.metrics, step.trains, **options)
    return PopulationStep(**options)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _OfAll(StepTraits):
    """The base of the steps of a population: the step of a member, its mapping, and stopping."""

    member: Step[Any]
    over: OverMembers
    stop_non_finite: bool
    example_axis: int
    is_population = True

    def run_chunk(
        self, run: Run, carry: PyTree, chunk: PyTree, n: jax.Array, on_chip_bytes: int
    ) -> tuple[PyTree, PyTree]:
        """Takes the steps of a chunk with as many members at a time as stay on the chip."""
        if on_chip_bytes == 0:
            return run(carry, chunk)
        shared = (carry.state if isinstance(carry, Metered) else carry).shared

        def with_shared(carry: PyTree, shared: PyTree) -> PyTree:
            return map_state(lambda population: population.replace(shared=shared), carry)

        def run_own(own: PyTree, chunk: PyTree) -> tuple[PyTree, PyTree]:
            carry, rows = run(with_shared(own, shared), chunk)
            return with_shared(carry, None), rows

        # What members share is read by each block, and is not divided.
        own = with_shared(carry, None)
        on_chip_bytes = max(on_chip_bytes - nbytes(shared), 1)
        blocks = count_blocks(own, on_chip_bytes)
        if blocks == 1:
            own, rows = run_own(copy_onto_chip(own, n, on_chip_bytes), chunk)
        else:
            axis = 1 if self.over.data == "per_member" else None
            own, rows = run_blocks(run_own, own, chunk, blocks, axis)
        return with_shared(own, shared), rows

    def require_data(self, data: Any, name: str) -> None:
        """Raises ValueError if the data have batches per member, and the step shares batches."""
        is_matching = self.over.data == "per_member" or not isinstance(data, Loader)
        advice = 'For batches per member: functrain.population.step(step, data="per_member").'
        require(is_matching, name, "batches that all members share", data, advice)

    def __repr__(self) -> str:
        return _repr.call(self, member=self.member, data=self.over.data, block=self.over.block)

    def _take_step(
        self, population: PopulationState, stacked: PyTree, batch: PyTree
    ) -> tuple[Any, jax.Array, PyTree]:
        """Returns the new carry, stacked, the members that are active after it, and the logs."""
        was_active, shared = population.active, population.shared

        def step(stacked: PyTree, batch: PyTree) -> Any:
            return self.over(joined_step(self.member, shared), stacked, batch, was_active)

        new, logs = step_active(step, stacked, batch, was_active)
        if shared is not None:
            require_unchanged(self.member, *self.over.take_first(stacked, batch), shared)
        active = was_active
        if self.stop_non_finite:
            states = new.state if isinstance(new, Metered) else new
            active = _where_finite(active, population.states, states, logs)
            # A second selection: the first one used the members that were active before the step.
            new = where_active(active, new, stacked)

        def hide_stopped(x: jax.Array) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x
            # `was_active`, not `active`: the non-finite loss that stops a member is reported.
            return where_active(was_active, x, jnp.full_like(x, jnp.nan))

        return new, active, jax.tree.map(hide_stopped, logs)


class PopulationStep(_OfAll):
    """The step of a population, without metrics; see `step`."""

    def __call__(self, state: PopulationState, batch: PyTree, /) -> tuple[PopulationState, PyTree]:
        """Takes one step with all active members."""
        require_population(state)
        new, active, logs = self._take_step(state, state.states, batch)
        return state.replace(states=new, active=active), logs


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MeteredPopulationStep(_OfAll, MeteredStep):
    """The step of a population, with metrics of each member, `[N]`; see `step`."""

    def start(self, state: PyTree) -> Metered:
        """Returns the population with initial metrics, `[N, ...]` each."""
        require_population(state)
        members = len(state)

        def repeat(x: jax.Array) -> jax.Array:
            # jnp.array copies: a broadcast may share one buffer, which must not be donated.
            return jnp.array(jnp.broadcast_to(x, (members, *x.shape)))

        return Metered(state, jax.tree.map(repeat, _tree.copy(self.metrics.init())))

    def values(self, metrics: PyTree) -> PyTree:
        """Returns the values of the metrics, `f32[N]` each."""
        return jax.vmap(self.metrics.compute)(metrics)

    def __call__(self, metered: Metered, batch: PyTree, /) -> tuple[Metered, PyTree]:
        """Takes one step with all active members, or evaluates all members."""
        state = metered.state
        require_population(state)
        # The metrics of a member are computed, and stopped, together with its state.
        stacked = Metered(state.states, metered.metrics)
        # Evaluation includes stopped members, whose values select the best one.
        if not self.trains:
            new, logs = self.over(joined_step(self.member, state.shared), stacked, batch)
            return Metered(state, new.metrics), logs
        new, active, logs = self._take_step(state, stacked, batch)
        return Metered(state.replace(states=new.state, active=active), new.metrics), logs


def _where_finite(active: jax.Array, old: PyTree, new: PyTree, logs: PyTree) -> jax.Array:
    """Returns the active members whose losses and state are finite after the step, `bool[N]`.

    Losses are the logs whose name ends with ``loss``. Numbers that were not finite before the step,
    such as an initial minimum of infinity, are ignored.
    """
    checks = [jnp.isfinite(x) for name, x in _tree.leaves_with_path(logs) if name.endswith("loss")]
    for old_leaf, new_leaf in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if jnp.issubdtype(new_leaf.dtype, jnp.inexact):
            checks.append(jnp.isfinite(new_leaf) | ~jnp.isfinite(old_leaf))
    for is_finite in checks:
        active &= jnp.all(is_finite, axis=tuple(range(1, is_finite.ndim)))
    return active
