"""The training step."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._log_values import LastValue
from functrain.common._types import PyTree, Step
from functrain.metrics._metric import Metric, collection
from functrain.step._check import check_loss, require_distinct_names
from functrain.step._loss import Aux, LossFn
from functrain.step._metered import MeteredStep, logs_of
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
    """Returns the training step, a pure function that is not jitted.

    Args:
      loss_fn: The loss, for example from `supervised`.
      tx: The optimizer the state was created with.
      metrics: Running metrics by name. The step then runs over `Metered(state, metrics)`; `fit`
        and `run` add the metrics to the state, reset them at each epoch, and remove them.
      learning_rate: The schedule inside `tx`, to log its values. It has no effect on the updates,
        whose learning rate is that of `tx`; optax does not expose the schedule of an optimizer. It
        is called with the optimizer's own count of updates, which differs from the count of steps
        under `optax.MultiSteps`. Rates injected by `optax.inject_hyperparams`, and those that the
        line search of `optax.lbfgs` finds, are logged without this argument; those of
        `param_groups` as ``<group>/learning_rate``. Between two updates of `optax.MultiSteps`, the
        rate of the last update is logged.

    Returns:
      ``step(state, batch) -> (state, logs)`` with
      ``logs = {"loss": f32[], "learning_rate": f32[] (if known), **aux.logs}``, and the logs of
      `tx` (see `logged`).

    Raises:
      TypeError: `loss_fn` is not a loss, `tx` is not an optax transformation, `learning_rate` is
        not a schedule, or `metrics` is not a dict of Metrics; or (when traced) the value of a
        metric is not a scalar.
      ValueError: (when traced) two of the loss, the logs, the metrics and the values of the
        optimizer have one name.

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
    expected = "a schedule, which is a function of the number of updates"
    advice = "A constant is optax.constant_schedule(rate)."
    is_schedule = learning_rate is None or callable(learning_rate)
    require(is_schedule, "learning_rate", expected, learning_rate, advice, error=TypeError)

    def train(state: TrainState, batch: PyTree) -> tuple[TrainState, jax.Array, Aux]:
        new, loss, aux = update(state, loss_fn, tx, batch)
        optimizer_logs = logged(new.opt_state)
        if learning_rate is not None:
            rate = jnp.asarray(learning_rate(_update_count(state)), jnp.float32)
            optimizer_logs = {**optimizer_logs, LastValue("learning_rate"): rate}
        require_distinct_names("logs", aux.logs, optimizer_logs)
        return new, loss, aux.replace(logs={**optimizer_logs, **aux.logs})

    if metrics:
        return MeteredStep(train, collection(metrics))

    def step(state: TrainState, batch: PyTree, /) -> tuple[TrainState, PyTree]:
        new, loss, aux = train(state, batch)
        return new, logs_of(loss, aux)

    return step


def _update_count(state: TrainState) -> jax.Array:
    """Returns the count that a schedule inside the optimizer is called with."""
    schedule_states = _tree.nodes(state.opt_state, optax.ScaleByScheduleState)
    if schedule_states:
        count: jax.Array = schedule_states[0].count
        return count
    multi_steps_states = _tree.nodes(state.opt_state, optax.MultiStepsState)
    return multi_steps_states[0].gradient_step if multi_steps_states else state.step
