"""The steps that leave the state as it is: evaluation and prediction."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _repr
from functrain.common._checks import require
from functrain.common._types import PyTree, Step
from functrain.metrics._metric import Metric, collection, mean_loss
from functrain.model._model import Model
from functrain.step._check import check_loss, check_step, refuse_model, refuse_names
from functrain.step._loss import Aux, LossFn
from functrain.step._metered import MeteredStep, check_names
from functrain.step._state import TrainState, check_rng
from functrain.step._update import value_of


def eval_step(
    loss_fn: LossFn,
    *,
    metrics: Mapping[str, Metric] | None = None,
    logs: Collection[str] = (),
    get_state: Callable[[Any], TrainState] | None = None,
    rng: jax.Array | None = None,
) -> MeteredStep:
    """Returns the step that evaluates: the loss with ``training=False``, the state untouched.

    Args:
      loss_fn: The loss.
      metrics: Running metrics by name, beside ``"loss"``, the mean over all examples. A batch
        counts by ``Aux.weight`` where the loss has one, so that weighted means do not depend on
        the batch size either.
      logs: Names in the loss's ``Aux.logs`` whose means over all examples are reported, too, as
        of several losses that are added up. They are weighted as the loss is.
      get_state: Returns the part of the training's state to evaluate, anything with `params` and
        `model_state`. One network of several: ``get_state=lambda states: states["student"]``. With
        averaged params: ``get_state=lambda s: s.replace(params=ft.tx.ema_params(s))``.
      rng: A typed key `key[]`, for a loss that draws in evaluation too, such as that of a
        variational autoencoder: batch number i is given ``fold_in(rng, i)``, the same in every
        evaluation, so that epochs can be compared. With None the loss is called with ``rng=None``.

    Returns:
      A step over `Metered(state, metrics)`, for `evaluate` or for a loop of one's own.

    Raises:
      TypeError: `loss_fn` is no loss, `metrics` no dict of Metrics, or `rng` no single typed key;
        or (when traced) the loss draws and there is no `rng`.
      ValueError: A metric or a log is called as another, or "loss"; or (when traced) the loss has
        no such log.

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

    def measure(
        state: PyTree, batch: PyTree, key: jax.Array | None = None
    ) -> tuple[PyTree, jax.Array, Aux]:
        part: TrainState = state if get_state is None else get_state(state)
        _require_params(part)
        loss, aux = value_of(loss_fn, part.params, part.model_state, batch, rng=key, training=False)
        missing, expected = sorted(set(logs) - set(aux.logs)), f"names among {sorted(aux.logs)}"
        require(not missing, "logs", expected, missing, "Return them in the loss's Aux(logs=...).")
        return state, loss, aux._replace(outputs=(aux.outputs, aux.logs))  # for `update_both`

    check_loss(loss_fn)
    check_names(metrics)
    check_rng(rng)
    refuse_names("logs", logs, ["loss", *(metrics or {})], "the loss and the metrics")
    mean = mean_loss()
    measured = collection({"loss": mean, **(metrics or {})})
    both = collection({"loss": mean, **(metrics or {}), **dict.fromkeys(logs, mean)})

    def update_both(m: PyTree, batch: PyTree, seen: PyTree, loss: Any, weight: Any = None) -> Any:
        outputs, aux_logs = seen
        new = measured.update(m, batch, outputs, loss, weight)
        for name in logs:
            new[name] = mean.update(m[name], batch, None, jnp.asarray(aux_logs[name]), weight)
        return new

    return MeteredStep(measure, both._replace(update=update_both), trains=False, rng=rng)


def _require_params(state: Any) -> None:
    """Raises TypeError for several networks where one is to be evaluated."""
    if not (hasattr(state, "params") and hasattr(state, "model_state")):
        raise TypeError(
            f"state: expected one with params and model_state, got {_repr.state_repr(state)}. Of "
            "several networks choose one: eval_step(loss_fn, get_state=lambda states: "
            "states['student']). Of a population: functrain.population.step(eval_step)."
        )


def predict_step(model: Model) -> Step[TrainState]:
    """Returns the step that predicts: ``(state, inputs) -> (state, outputs)``, state untouched.

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

    def step(state: TrainState, inputs: PyTree, /) -> tuple[TrainState, PyTree]:
        try:
            return state, model.apply(state.params, state.model_state, inputs).outputs
        except Exception as error:
            if isinstance(inputs, tuple | list):
                error.add_note(
                    f"The model was given a {type(inputs).__name__} of {len(inputs)} as inputs. "
                    "predict takes batches of inputs alone: ArrayLoader(x, batch_size)."
                )
            raise

    return step


def check_predict_step(step: Any) -> None:
    """Refuses what is no function of a state and inputs: models, and steps that measure."""
    expected = "step: expected (state, inputs) -> (state, outputs)"
    refuse_model(step, expected, "predict_step({})")
    check_step(step)
    if isinstance(step, MeteredStep):
        raise TypeError(
            f"{expected}, got a step that carries metrics. Make one with "
            "functrain.predict_step(model)."
        )
