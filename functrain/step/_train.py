"""The step that trains."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from functrain.common._types import PyTree, Step
from functrain.metrics._metric import Metric, collection
from functrain.step._check import check_loss
from functrain.step._learning_rate import applied_rate
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
    if not (learning_rate is None or callable(learning_rate)):
        raise TypeError(
            "learning_rate: expected the schedule inside tx, count -> rate, got "
            f"{learning_rate!r}. A constant rate goes into tx alone, as in optax.adam(1e-3); to "
            "see it in the logs, optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
        )

    def train(state: TrainState, batch: PyTree) -> tuple[TrainState, jax.Array, Aux]:
        new, loss, aux = update(state, loss_fn, tx, batch)
        own = {**applied_rate(state, new, learning_rate), **logged(new.opt_state)}
        if both := sorted(own.keys() & aux.logs):
            raise ValueError(
                f"logs: expected names other than {', '.join(map(repr, both))}, which train_step "
                "logs itself of tx, got it from loss_fn as well. Rename that log."
            )
        return new, loss, aux._replace(logs={**own, **aux.logs})

    check_names(metrics)
    return MeteredStep(train, collection(metrics)) if metrics else plain(train)
