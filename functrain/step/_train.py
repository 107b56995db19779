"""The step that trains."""

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree, Step
from functrain.metrics._metric import Metric, collection
from functrain.step._check import check_loss, refuse_names
from functrain.step._loss import Aux, LossFn
from functrain.step._metered import MeteredStep, check_names, plain
from functrain.step._state import TrainState, check_tx
from functrain.step._update import update
from functrain.tx._logs import logged


def train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    metrics: Mapping[str, Metric] | None = None,
    learning_rate: optax.Schedule | None = None,
) -> Step[Any]:
    """Returns the step that trains: pure, not jitted.

    Args:
      loss_fn: The loss, for example from `supervised`.
      tx: The optimizer the state was created with.
      metrics: Running metrics by name. With them the step runs over `Metered(state, metrics)`;
        `fit` and `run` wrap, reset at each epoch and unwrap.
      learning_rate: The schedule inside `tx`, for the logs only: optax does not show it. It is
        asked with the optimizer's own count of updates, which under `optax.MultiSteps` is not that
        of steps. Rates injected by `optax.inject_hyperparams` are found without, those of `groups`
        as ``<group>/learning_rate``; inside `optax.MultiSteps` it is, between two updates, that of
        the last one.

    Returns:
      ``step(state, batch) -> (state, logs)`` with
      ``logs = {"loss": f32[], "learning_rate": f32[] (where known), **aux.logs}``, and what `tx`
      says of itself (`logged`).

    Raises:
      TypeError: `loss_fn` is no loss, `tx` no optax transformation, `metrics` no dict of Metrics,
        or `learning_rate` no function; or (when traced) a metric's value is no scalar.
      ValueError: A metric is called "loss", "learning_rate" or "seconds"; or (when traced) a log
        is called so, or as a metric is.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> def loss_fn(params, model_state, batch, *, rng, training):
      ...     return jnp.mean((batch * params["w"] - 1) ** 2), Aux(model_state)
      >>> tx = optax.adam(0.1)
      >>> step = jax.jit(train_step(loss_fn, tx))
      >>> state = TrainState.create(params={"w": jnp.zeros(())}, tx=tx)
      >>> state, logs = step(state, jnp.ones(8))
      >>> print(state.step, logs["loss"])
      1 1.0
    """
    check_loss(loss_fn)
    check_tx(tx)
    require(
        learning_rate is None or callable(learning_rate),
        "learning_rate",
        "the schedule inside tx, count -> rate",
        learning_rate,
        "A constant rate goes into tx alone, as in optax.adam(1e-3); to see it in the logs, "
        "optax.inject_hyperparams(optax.adam)(learning_rate=1e-3).",
        error=TypeError,
    )

    def train(state: TrainState, batch: PyTree) -> tuple[TrainState, jax.Array, Aux]:
        new, loss, aux = update(state, loss_fn, tx, batch)
        own = {**_applied_rate(state, new, learning_rate), **logged(new.opt_state)}
        refuse_names("logs", aux.logs, own, "the optimizer")
        return new, loss, aux._replace(logs={**own, **aux.logs})

    check_names(metrics)
    return MeteredStep(train, collection(metrics)) if metrics else plain(train)


def _applied_rate(
    old: TrainState, new: TrainState, schedule: optax.Schedule | None
) -> dict[str, jax.Array]:
    """Returns the learning rate of an update as a log; nothing where it is unknown."""
    if schedule is not None:
        return {"learning_rate": jnp.asarray(schedule(_count(old)), jnp.float32)}
    # inject_hyperparams writes down, with an update, the values it was made with.
    rates = [(_name(path), x) for path, x in _named("learning_rate", new.opt_state)]
    times = Counter(name for name, _ in rates)
    return {name: jnp.asarray(x, jnp.float32) for name, x in rates if times[name] == 1}


def _name(path: list[str]) -> str:
    """Names a rate after the groups it is in; optax.partition keeps their states by name."""
    groups = [b for a, b in itertools.pairwise(path) if a == "inner_states"]
    return "/".join([*groups, "learning_rate"])


def _count(state: TrainState) -> jax.Array:
    """Returns the count that a schedule inside the optimizer is called with."""
    found = [x.count for x in _tree.nodes(state.opt_state, optax.ScaleByScheduleState)]
    found = found or [x for _, x in _named("gradient_step", state.opt_state)]  # MultiSteps'
    return found[0] if found else state.step


def _named(name: str, tree: PyTree) -> list[tuple[list[str], jax.Array]]:
    found = [(path.split("/"), x) for path, x in _tree.leaves_with_path(tree)]
    return [(path, x) for path, x in found if path[-1] == name]
