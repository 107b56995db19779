"""The step over all members."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _repr, _tree
from functrain.common._checks import require
from functrain.common._types import PyTree, Step, StepTraits, traits_of
from functrain.metrics._metric import Metered
from functrain.population._loader import Loader
from functrain.population._over_members import Block, Data, OverMembers, where_active
from functrain.population._state import PopulationState, require_population
from functrain.step._check import check_step
from functrain.step._metered import MeteredStep


def step(
    step: Step[Any],
    *,
    data: Data = "shared",
    block: Block = "auto",
    stop_non_finite: bool = False,
) -> Step[Any]:
    """Returns the step of a population: that of one member, taken by all.

    A step like any other: `fuse`, `run`, `fit`, `evaluate` and `Checkpointer` take it. What it
    logs, and its metrics, are one value a member: `[N]` a step, in the history `[steps, N]`, in
    files a column or tag ``loss/0``, ``loss/1``, ... a member. Of members that are stopped, logs
    are NaN.

    A member's values are those it would have alone, but for last bits where the compiler orders
    sums otherwise for many members than for one. They do not depend on how steps are fused.

    Args:
      step: ``(state, batch) -> (state, logs)`` of one member: from `train_step`, with metrics or
        without, from `eval_step`, or any of your own.
      data: ``"shared"``: all members see each batch. ``"per_member"``: the leaves of a batch are
        `[N, B, ...]`, a part for each member.
      block: How many members at once. With None all of them, by `jax.vmap`; with 1 one after the
        other in the same program, where one that is stopped costs nothing. In between in blocks.
        ``"auto"`` takes 1 on CPU where a member has convolutions, and None elsewhere; `autotune`
        measures which is fastest.
      stop_non_finite: Stop a member for good at the step after which its loss or its state would
        not be finite; it keeps the state from before that step.

    Returns:
      A step over `PopulationState`, with metrics where `step` has some.

    Raises:
      TypeError: `step` is no step; or (when traced) the state is no population.
      ValueError: `data` or `block` is none of those; or (when traced) the batch has no part for
        each member.

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
    is_of_one = not traits_of(step).is_population
    require(is_of_one, "step", "that of one member", step, error=TypeError)
    over = OverMembers(step, data, block)
    if isinstance(step, MeteredStep):
        return MeteredPopulationStep(
            step.base, step.metrics, step.trains, over=over, stop_non_finite=stop_non_finite
        )
    return PopulationStep(over=over, stop_non_finite=stop_non_finite)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _OfAll(StepTraits):
    """What the steps of a population have in common: the member's over all, and how they stop."""

    over: OverMembers
    stop_non_finite: bool
    is_population = True

    def require_data(self, data: Any, name: str) -> None:
        """Raises ValueError if members have batches of their own and all would see all of them."""
        is_fitting = self.over.data == "per_member" or not isinstance(data, Loader)
        advice = 'For batches of their own: functrain.population.step(step, data="per_member").'
        require(is_fitting, name, "batches that all members see", data, advice)

    def __repr__(self) -> str:
        over = self.over
        return _repr.call(self, member=over.function, data=over.data, block=over.block)

    def _stepped(
        self, population: PopulationState, stacked: PyTree, batch: PyTree
    ) -> tuple[Any, jax.Array, PyTree]:
        """Returns what is carried, stacked, which members go on, and what is reported of them."""
        was_active = population.active
        new, logs = self.over.step_active(stacked, batch, was_active)
        active = was_active
        if self.stop_non_finite:
            states = new.state if isinstance(new, Metered) else new
            active &= _stay_finite(population.states, states, logs)
            new = where_active(active, new, stacked)

        def hide(x: jax.Array) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x
            # Of the step at which a member stops, the loss is reported as it was.
            return where_active(was_active, x, jnp.full_like(x, jnp.nan))

        return new, active, jax.tree.map(hide, logs)


class PopulationStep(_OfAll):
    """A step without metrics over a population; see `step`."""

    def __call__(self, state: PopulationState, batch: PyTree, /) -> tuple[PopulationState, PyTree]:
        """Takes one step with all members that are active."""
        require_population(state)
        new, active, logs = self._stepped(state, state.states, batch)
        return PopulationState(new, active), logs


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MeteredPopulationStep(_OfAll, MeteredStep):
    """A step with metrics over a population, which are `[N]` each; see `step`."""

    def start(self, state: PyTree) -> Metered:
        """Returns the population with metrics that have seen nothing, `[N, ...]` each."""
        require_population(state)
        one, members = _tree.copy(self.metrics.init()), len(state)
        each = jax.tree.map(lambda x: jnp.array(jnp.broadcast_to(x, (members, *x.shape))), one)
        return Metered(state, each)

    def values(self, metrics: PyTree) -> PyTree:
        """Returns what the metrics come to, `f32[N]` each."""
        return jax.vmap(self.metrics.compute)(metrics)

    def __call__(self, metered: Metered, batch: PyTree, /) -> tuple[Metered, PyTree]:
        """Takes one step with all members that are active; evaluates all of them."""
        state = metered.state
        require_population(state)
        stacked = Metered(state.states, metered.metrics)
        if not self.trains:
            new, logs = self.over(stacked, batch)
            return Metered(state, new.metrics), logs
        new, active, logs = self._stepped(state, stacked, batch)
        return Metered(PopulationState(new.state, active), new.metrics), logs


def _stay_finite(old: PyTree, new: PyTree, logs: PyTree) -> jax.Array:
    """Returns `bool[N]`: whether loss and state are finite; what was not before need not be."""
    ok = jnp.isfinite(logs["loss"])
    for was, is_now in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if jnp.issubdtype(is_now.dtype, jnp.inexact):
            fine = jnp.isfinite(is_now) | ~jnp.isfinite(was)
            ok &= jnp.all(fine, axis=tuple(range(1, is_now.ndim)))
    return jnp.asarray(ok)
