"""The step that trains."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from functrain.common._types import PyTree, Step
from functrain.metrics._metric import Metric, collection
from functrain.step._learning_rate import learning_rate_of
from functrain.step._loss import Aux, LossFn
from functrain.step._metered import MeteredStep, check_names, plain
from functrain.step._state import TrainState, check_tx
from functrain.step._update import update


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
      learning_rate: The schedule inside `tx`, for the logs only: optax does not show it. A rate
        injected by `optax.inject_hyperparams` is found without.

    Returns:
      ``step(state, batch) -> (state, logs)`` with
      ``logs = {"loss": f32[], "learning_rate": f32[] (where known), **aux.logs}``.

    Raises:
      TypeError: `tx` is no optax transformation, or `metrics` no dict of Metrics.
      ValueError: A metric is called "loss", "learning_rate" or "seconds".

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
    check_tx(tx)

    def train(state: TrainState, batch: PyTree) -> tuple[TrainState, jax.Array, Aux]:
        rate = learning_rate_of(state, learning_rate)
        state, loss, aux = update(state, loss_fn, tx, batch)
        return state, loss, aux._replace(logs={**rate, **aux.logs})

    check_names(metrics)
    return MeteredStep(train, collection(metrics)) if metrics else plain(train)
