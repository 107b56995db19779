"""Steps that leave the state unchanged: evaluation and prediction."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _repr, _tree
from functrain.common._checks import require
from functrain.common._types import PyTree, Step
from functrain.data._batch import Part, require_parts, select
from functrain.metrics._metric import Metric, collection, mean_loss
from functrain.model._model import Model, require_model
from functrain.step._check import (
    check_loss,
    check_step,
    require_distinct_names,
    require_no_model,
)
from functrain.step._loss import Aux, LossFn
from functrain.step._metered import MeteredStep
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
        Averaged params: ``get_state=lambda s: s.replace(params=ft.tx.ema_params(s))``.
      rng: A typed key `key[]`, for a loss that draws random numbers in evaluation too, such as
        that of a variational autoencoder. Batch number i gets ``fold_in(rng, i)``, the same in
        every evaluation, so that epochs can be compared. With None, the loss gets ``rng=None``.

    Returns:
      A step over `Metered(state, metrics)`, for `evaluate` or for your own loop.

    Raises:
      TypeError: `loss_fn` is not a loss, `metrics` is not a dict of Metrics, or `rng` is not a
        single typed key; or (when traced) the loss draws random numbers and `rng` is None.
      ValueError: Two metrics or logs have the same name, one is named "loss", or `logs` is a text;
        or (when traced) the loss has no log of that name.

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
        network: TrainState = state if get_state is None else get_state(state)
        _require_params(network)
        loss, aux = compute_loss(
            loss_fn, network.params, network.model_state, batch, rng=key, training=False
        )
        return state, loss, aux

    check_loss(loss_fn)
    check_rng(rng)
    require(not isinstance(logs, str), "logs", "a tuple of names", logs, f"Write ({logs!r},).")
    require_distinct_names("metrics", metrics or (), ["loss"], "the loss")
    require_distinct_names("logs", logs, ["loss", *(metrics or {})], "the loss and the metrics")
    mean = mean_loss()
    user_metrics = collection({"loss": mean, **(metrics or {})})
    # The means of logs need their own update, which looks up each log by its name. From this
    # collection, only `init` and `compute` are used.
    all_metrics = collection({"loss": mean, **(metrics or {}), **dict.fromkeys(logs, mean)})

    def update_all(m: PyTree, batch: PyTree, aux: Aux, loss: jax.Array) -> Any:
        new = user_metrics.update(m, batch, aux, loss)
        # By their paths, as in the history of a training.
        values = dict(_tree.leaves_with_path(aux.logs)) if logs else {}
        missing, expected = sorted(set(logs) - set(values)), f"names among {sorted(values)}"
        require(not missing, "logs", expected, missing, "Return them in the loss's Aux(logs=...).")
        for name in logs:
            new[name] = mean.update(m[name], batch, aux, jnp.asarray(values[name]))
        return new

    return MeteredStep(measure, all_metrics._replace(update=update_all), trains=False, rng=rng)


def _require_params(state: Any) -> None:
    """Raises TypeError unless a state has `params` and `model_state`; several networks have not."""
    if not (hasattr(state, "params") and hasattr(state, "model_state")):
        raise TypeError(
            "state: expected a state with params and model_state, got "
            f"{_repr.state_repr(state)}. Choose one of several networks with "
            "eval_step(loss_fn, get_state=lambda states: states['student']). For a population, use "
            "functrain.population.step(eval_step)."
        )


def predict_step(model: Model, *, inputs: Part | None = None) -> Step[TrainState]:
    """Returns the step ``(state, batch) -> (state, outputs)``, which keeps the state unchanged.

    Args:
      model: The model to apply.
      inputs: The part of a batch that the model gets, as in `supervised`. With None, it is the
        whole batch.

    Raises:
      TypeError: `model` is not a Model, or `inputs` is neither a text nor a function.

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
    require_parts(inputs=inputs)

    def step(state: TrainState, batch: PyTree, /) -> tuple[TrainState, PyTree]:
        x = batch if inputs is None else select(batch, inputs, "inputs")
        try:
            with error_notes(x, state.params):
                output = apply_model(
                    model, state.params, state.model_state, x, rng=None, training=False
                )
            return state, output.outputs
        except Exception as error:
            # Some models take a tuple of inputs, so that a batch (x, y) is noticed only when it
            # fails.
            if isinstance(x, tuple | list):
                error.add_note(
                    f"The model was given a {type(x).__name__} of {len(x)} as inputs. "
                    "predict takes batches of inputs alone: ArrayLoader(x, batch_size)."
                )
            raise

    return step


def check_predict_step(step: Any) -> None:
    """Raises TypeError for a model, a step with metrics, or something that is not a step."""
    expected = "step: expected (state, inputs) -> (state, outputs)"
    require_no_model(step, expected, "predict_step({})")
    check_step(step)
    # It has the right signature, but returns logs instead of outputs.
    if isinstance(step, MeteredStep):
        raise TypeError(
            f"{expected}, got a step that carries metrics. Make a step with "
            "functrain.predict_step(model)."
        )
