"""The steps that leave the state as it is: evaluation and prediction."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _repr
from functrain.common._types import PyTree, Step
from functrain.metrics._metric import Metric, collection, mean_loss
from functrain.model._model import Model
from functrain.step._check import check_loss, check_step, refuse_model
from functrain.step._loss import Aux, LossFn
from functrain.step._metered import MeteredStep, check_names
from functrain.step._state import TrainState, check_rng
from functrain.step._update import value_of


def eval_step(
    loss_fn: LossFn,
    *,
    metrics: Mapping[str, Metric] | None = None,
    logs: Collection[str] = (),
    of: Callable[[Any], TrainState] | None = None,
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
      of: Where the training's state holds several networks, which of them to evaluate:
        ``of=lambda states: states["student"]``. Anything with `params` and `model_state` will do.
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
        part: TrainState = state if of is None else of(state)
        _require_params(part)
        loss, aux = value_of(loss_fn, part.params, part.model_state, batch, rng=key, training=False)
        if missing := set(logs) - set(aux.logs):
            raise ValueError(
                f"logs: expected names that the loss logs, {sorted(aux.logs)}, got "
                f"{sorted(missing)}. Return them in Aux(logs=...)."
            )
        # Metrics see outputs, and nothing else of an Aux.
        return state, loss, aux._replace(outputs=(aux.outputs, aux.logs))

    check_loss(loss_fn)
    check_names(metrics)
    check_rng(rng)
    if taken := sorted({"loss", *(metrics or {})} & set(logs)):
        raise ValueError(
            f"logs: expected names other than 'loss' and those of the metrics, got {taken}"
        )
    judged = collection({"loss": mean_loss(), **(metrics or {})})
    means = collection({name: _mean_log(name) for name in logs})

    def update(
        m: PyTree, batch: PyTree, outputs: PyTree, loss: jax.Array, weight: Any = None
    ) -> PyTree:
        outputs, logged = outputs
        new = judged.update(m, batch, outputs, loss, weight)
        return new | means.update(m, batch, logged, loss, weight)

    both = Metric(
        init=lambda: judged.init() | means.init(),
        update=update,
        compute=lambda m: judged.compute(m) | means.compute(m),
    )
    return MeteredStep(measure, both, trains=False, rng=rng)


def _require_params(state: Any) -> None:
    """Refuses several networks where one is to be evaluated."""
    if not (hasattr(state, "params") and hasattr(state, "model_state")):
        raise TypeError(
            f"state: expected one with params and model_state, got {_repr.state(state)}. Of "
            "several networks say which: eval_step(loss_fn, of=lambda states: states['student']). "
            "Of a population: functrain.population.step(eval_step)."
        )


def _mean_log(name: str) -> Metric:
    """As `mean_loss`, of a log; it is given the logs for outputs."""
    mean = mean_loss()

    def update(
        m: PyTree, batch: PyTree, outputs: PyTree, loss: jax.Array, weight: Any = None
    ) -> PyTree:
        return mean.update(m, batch, None, jnp.asarray(outputs[name]), weight)

    return mean._replace(update=update)


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
