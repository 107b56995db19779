"""Steps that leave the state unchanged: evaluation and prediction."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._arguments import accepts
from functrain.common._checks import require
from functrain.common._types import PyTree, Step
from functrain.data._batch import Part, select
from functrain.metrics._metric import Metric, collection, mean_loss
from functrain.model._model import Model, require_model
from functrain.step._check import check_loss, require_distinct_names, require_function
from functrain.step._loss import Aux, LossFn
from functrain.step._metered import BATCH_COUNT, MeteredStep
from functrain.step._notes import error_notes
from functrain.step._state import TrainState, check_rng
from functrain.step._supervised import apply_model
from functrain.step._update import compute_loss


def eval_step(
    loss_fn: LossFn,
    *,
    metrics: Mapping[str, Metric] | None = None,
    logs: Collection[str] = (),
    get_state: Callable[[Any], TrainState] | None = None,
    rng: jax.Array | None = None,
) -> MeteredStep:
    """Returns the step that evaluates a loss with ``training=False`` and keeps the state unchanged.

    Args:
      loss_fn: The loss.
      metrics: Running metrics by name, beside ``"loss"``, the mean over all examples. Batches are
        weighted by ``Aux.weight`` if the loss returns one, so that weighted means do not depend
        on the batch size either.
      logs: Names in the loss's ``Aux.logs``, or paths in nested ones, whose means over all examples
        are reported as well, for example the terms of a loss that is a sum. They are weighted as
        the loss is.
      get_state: Returns the part of the training state to evaluate, an object with `params` and
        `model_state`. One of several networks: ``get_state=lambda states: states["student"]``.
        Averaged params: ``get_state=ft.tx.averaged``.
      rng: A typed key `key[]`, for a loss that draws random numbers in evaluation too, such as
        that of a variational autoencoder. Batch number i gets ``fold_in(rng, i)``, the same in
        every evaluation, so that epochs can be compared. With None, the loss gets ``rng=None``.

    Returns:
      A step over `Metered(state, metrics)`, for `evaluate` or for your own loop.

    Raises:
      TypeError: `loss_fn` is not a loss, `metrics` is not a dict of Metrics, or `rng` is not a
        single typed key; or (when traced) the loss draws random numbers and `rng` is None.
      ValueError: Two metrics or logs have the same name, or one is named "loss"; or (when traced)
        the loss has no log of that name.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> def loss_fn(params, model_state, batch, *, rng, training):
      ...     return jnp.mean((batch - params["w"]) ** 2), Aux(model_state)
      >>> state = TrainState.create(params={"w": jnp.zeros(())}, tx=optax.sgd(0.1))
      >>> step = eval_step(loss_fn)
      >>> metered, logs = step(step.start(state), jnp.ones(4))
      >>> print(step.metrics.compute(metered.metrics)["loss"])
      1.0
    """
    check_loss(loss_fn)
    check_rng(rng)
    metrics = metrics or {}
    require_distinct_names("metrics and logs", ["loss"], metrics, logs)

    def measure(
        state: PyTree, batch: PyTree, key: jax.Array | None = None
    ) -> tuple[PyTree, jax.Array, Aux]:
        network: Any = state if get_state is None else get_state(state)
        is_state = hasattr(network, "params") and hasattr(network, "model_state")
        advice = "Pass get_state=, or for a population functrain.population.step(eval_step)."
        expected = "a state with params and model_state"
        require(is_state, "state", expected, network, advice, error=TypeError)
        loss, aux = compute_loss(
            loss_fn, network.params, network.model_state, batch, rng=key, training=False
        )
        return state, loss, aux

    named = {"loss": mean_loss(), **metrics, **{name: _mean_of_log(name) for name in logs}}
    metric = collection(named)
    if rng is not None:
        metric = _count_batches(metric)
    return MeteredStep(measure, metric, trains=False, rng=rng)


def _mean_of_log(name: str) -> Metric:
    """Returns the metric of the mean of a log over all examples."""
    mean = mean_loss()

    def update(m: PyTree, batch: PyTree, aux: Aux, loss: jax.Array) -> PyTree:
        # By their paths, as in the history of a training.
        values = dict(_tree.leaves_with_path(aux.logs))
        advice = "Return it in the loss's Aux(logs=...)."
        require(name in values, "logs", f"names among {sorted(values)}", name, advice)
        return mean.update(m, batch, aux, jnp.asarray(values[name]))

    return mean._replace(update=update)


def _count_batches(metric: Metric) -> Metric:
    """Returns a dict of metrics that also counts batches; the count is not among its values."""

    def update(m: PyTree, batch: PyTree, aux: Aux, loss: jax.Array) -> Any:
        new = metric.update(m, batch, aux, loss)
        return {**new, BATCH_COUNT: m[BATCH_COUNT] + 1}

    return Metric(lambda: {**metric.init(), BATCH_COUNT: jnp.int32(0)}, update, metric.compute)


def predict_step(model: Model, *, inputs: Part | None = None) -> Step[TrainState]:
    """Returns the step ``(state, batch) -> (state, outputs)``, which keeps the state unchanged.

    Args:
      model: The model to apply.
      inputs: The part of a batch that the model gets, as in `supervised`. With None, it is the
        whole batch.

    Raises:
      TypeError: `model` is not a Model.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import ModelOutput
      >>> model = Model(
      ...     init=lambda key, x: ({"w": jnp.ones((3, 1))}, {}),
      ...     apply=lambda p, s, x, *, rng=None, training=False: ModelOutput(x @ p["w"], s),
      ... )
      >>> state = TrainState.create(params={"w": jnp.ones((3, 1))}, tx=optax.sgd(0.1))
      >>> state, outputs = predict_step(model)(state, jnp.ones((2, 3)))
      >>> outputs.shape
      (2, 1)
    """
    require_model(model)

    def step(state: TrainState, batch: PyTree, /) -> tuple[TrainState, PyTree]:
        x = batch if inputs is None else select(batch, inputs, "inputs")
        with error_notes(x):
            output = apply_model(
                model, state.params, state.model_state, x, rng=None, training=False
            )
        return state, output.outputs

    return step


def check_predict_step(step: Any) -> None:
    """Raises TypeError for a model, a step with metrics, or something that is not a step."""
    # A step with metrics has the right signature, but returns logs instead of outputs.
    is_valid = accepts(step, 2) and not isinstance(step, MeteredStep)
    expected = "(state, inputs) -> (state, outputs)"
    advice = "Make it with functrain.predict_step(model)."
    require_function("step", step, expected, advice, is_valid=is_valid)
