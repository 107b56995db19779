"""Steps: what one batch does to a state."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._types import PyTree, Step
from functrain.metrics._metric import Metered, Metric, collection, mean_loss
from functrain.model._model import Model
from functrain.step._loss import Aux, LossFn
from functrain.step._state import TrainState, check_tx


def update(
    state: TrainState, loss_fn: LossFn, tx: optax.GradientTransformation, *args: PyTree
) -> tuple[TrainState, jax.Array, Aux]:
    """Takes one gradient step: the piece `train_step` is made of; a GAN is two of these.

    Args:
      state: Its `rng`, folded with its `step`, is the randomness of the loss.
      loss_fn: ``loss_fn(params, model_state, *args, rng=, training=True) -> (f32[], Aux)``.
      tx: The optimizer. One whose `update` takes `value`, `grad` or `value_fn` (line searches,
        plateau schedules) gets them.
      *args: Passed on to `loss_fn`, usually one batch.

    Returns:
      The new state (`model_state` from the aux, `step` one higher), the loss `f32[]` before the
      update, and the aux.

    Raises:
      TypeError: (when traced) the loss is no scalar, or no pair of a scalar and an Aux.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> def loss_fn(params, model_state, x, *, rng, training):
      ...     return jnp.sum((params["w"] - x) ** 2), Aux(model_state)
      >>> tx = optax.sgd(0.25)
      >>> state = TrainState.create(params={"w": jnp.zeros(2)}, tx=tx)
      >>> state, loss, aux = update(state, loss_fn, tx, jnp.ones(2))
      >>> print(loss, state.params["w"])
      2.0 [0.5 0.5]
    """
    rng = None if state.rng is None else jax.random.fold_in(state.rng, state.step)

    def loss_of(params: PyTree) -> tuple[jax.Array, Aux]:
        return _checked(loss_fn(params, state.model_state, *args, rng=rng, training=True))

    (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    new = state.apply_gradients(
        grads, tx, value=loss, grad=grads, value_fn=lambda params: loss_of(params)[0]
    )
    return new.replace(model_state=aux.model_state), loss, aux


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
        rate = _learning_rate(state, learning_rate)
        state, loss, aux = update(state, loss_fn, tx, batch)
        return state, loss, aux._replace(logs={**rate, **aux.logs})

    _check_names(metrics)
    return MeteredStep(train, collection(metrics)) if metrics else _plain(train)


def eval_step(
    loss_fn: LossFn,
    *,
    metrics: Mapping[str, Metric] | None = None,
    of: Callable[[Any], TrainState] | None = None,
) -> "MeteredStep":
    """Returns the step that evaluates: the loss with ``training=False``, the state untouched.

    Args:
      loss_fn: The loss; called with ``rng=None``.
      metrics: Running metrics by name, beside ``"loss"``, the mean over all examples.
      of: Where the training's state holds several networks, which of them to evaluate:
        ``of=lambda states: states["student"]``. Anything with `params` and `model_state` will do.

    Returns:
      A step over `Metered(state, metrics)`, for `evaluate` or for a loop of one's own.

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

    def measure(state: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array, Aux]:
        part: TrainState = state if of is None else of(state)
        loss, aux = _checked(
            loss_fn(part.params, part.model_state, batch, rng=None, training=False)
        )
        return state, loss, aux

    _check_names(metrics)
    both = collection({"loss": mean_loss(), **(metrics or {})})
    return MeteredStep(measure, both, trains=False)


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
        return state, model.apply(state.params, state.model_state, inputs).outputs

    return step


@dataclasses.dataclass(frozen=True, eq=False)
class MeteredStep:
    """A step over `Metered(state, metrics)` that knows its metrics.

    Attributes:
      base: ``(state, batch) -> (state, loss f32[], Aux)``.
      metrics: The metrics as one `Metric`; its `compute` returns a dict.
      trains: Whether it changes the state; `evaluate` takes those only that do not.

    Examples:
      >>> import jax.numpy as jnp
      >>> step = MeteredStep(
      ...     lambda state, batch: (state, jnp.mean(batch), Aux()), collection({"m": mean_loss()})
      ... )
      >>> metered, logs = step(step.start(()), jnp.ones(3))
      >>> print(step.metrics.compute(metered.metrics)["m"])
      1.0
    """

    base: Callable[[Any, PyTree], tuple[Any, jax.Array, Aux]]
    metrics: Metric
    trains: bool = True

    def start(self, state: PyTree) -> Metered:
        """Returns the state with metrics that have seen nothing."""
        return Metered(state, _tree.copy(self.metrics.init()))

    def __call__(self, metered: Metered, batch: PyTree, /) -> tuple[Metered, PyTree]:
        """Takes one step and updates the metrics with it."""
        if not isinstance(metered, Metered):
            raise TypeError(
                f"expected Metered(state, metrics), got {type(metered).__name__}. This step "
                "carries metrics: begin with step.start(state). fit and run do that for a step "
                "as train_step returns it; jit, vmap or partial around it hide its metrics."
            )
        state, loss, aux = self.base(metered.state, batch)
        metrics = self.metrics.update(metered.metrics, batch, aux.outputs, loss)
        return Metered(state, metrics), {"loss": loss, **aux.logs}


def _check_names(metrics: Mapping[str, Metric] | None) -> None:
    """Refuses names that the loop itself uses."""
    taken = {"loss", "learning_rate", "seconds"} & set(metrics or {})
    if taken:
        raise ValueError(
            f"metrics: expected names other than {sorted(taken)}, which the loop reports itself. "
            "Choose another name."
        )


def _plain(base: Callable[[Any, PyTree], tuple[Any, jax.Array, Aux]]) -> Step[Any]:
    def step(state: PyTree, batch: PyTree, /) -> tuple[PyTree, PyTree]:
        if isinstance(state, Metered):
            raise TypeError("expected a bare state, got Metered: give the step `metrics=` too")
        state, loss, aux = base(state, batch)
        return state, {"loss": loss, **aux.logs}

    return step


def _checked(result: Any) -> tuple[jax.Array, Aux]:
    """Returns what a loss returned, or says what is wrong with it."""
    try:
        loss, aux = result
    except (TypeError, ValueError):
        aux = loss = None
    if not isinstance(aux, Aux):
        raise TypeError(
            "loss_fn: expected (loss, functrain.Aux(model_state, outputs, logs)), got "
            f"{type(result).__name__}: {result}"
        )
    loss = jnp.asarray(loss)
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            f"loss_fn: expected a scalar loss, float32[], got {_tree.spec(loss)}. Reduce it with "
            "jnp.mean, or let functrain.supervised do that."
        )
    return loss, aux


def _learning_rate(state: TrainState, schedule: optax.Schedule | None) -> dict[str, jax.Array]:
    if schedule is not None:
        return {"learning_rate": jnp.asarray(schedule(state.step), jnp.float32)}
    found = optax.tree.get_all_with_path(state.opt_state, "learning_rate")
    if len(found) == 1:
        return {"learning_rate": jnp.asarray(found[0][1], jnp.float32)}
    return {}
