"""Steps that carry running metrics, and steps that do not."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _repr, _tree
from functrain.common._types import PyTree, Step
from functrain.metrics._metric import Metered, Metric, updated
from functrain.step._loss import Aux
from functrain.step._state import TrainState
from functrain.tx._loss_scale import guards


@dataclasses.dataclass(frozen=True, eq=False)
class MeteredStep:
    """A step over `Metered(state, metrics)` that knows its metrics.

    Attributes:
      base: ``(state, batch) -> (state, loss f32[], Aux)``; with an `rng`, ``(state, batch, key)``.
      metrics: The metrics as one `Metric`; its `compute` returns a dict.
      trains: Whether it changes the state; `evaluate` takes those only that do not.
      rng: A key `key[]` for a base that draws, or None. Batch number i, counted beside the
        metrics, gets ``fold_in(rng, i)``.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain.metrics import collection, mean_loss
      >>> step = MeteredStep(
      ...     lambda state, batch: (state, jnp.mean(batch), Aux()), collection({"m": mean_loss()})
      ... )
      >>> metered, logs = step(step.start(()), jnp.ones(3))
      >>> print(step.metrics.compute(metered.metrics)["m"])
      1.0
    """

    base: Callable[..., tuple[Any, jax.Array, Aux]]
    metrics: Metric
    trains: bool = True
    rng: jax.Array | None = None
    # Whether states are of many members, and what is reported one value a member.
    is_population = False

    def __post_init__(self) -> None:
        if self.rng is not None:
            object.__setattr__(self, "metrics", _counted(self.metrics))

    def __repr__(self) -> str:
        return _repr.call(self, base=self.base, trains=self.trains)

    def traced_with(self, state: PyTree, *args: Any) -> tuple[Any, ...]:
        """Returns the arguments to trace it with: a bare state is started."""
        return state if isinstance(state, Metered) else self.start(state), *args

    def start(self, state: PyTree) -> Metered:
        """Returns the state with metrics that have seen nothing."""
        if isinstance(state, Metered):
            raise TypeError("state: expected a bare state, got Metered: it has been started")
        return Metered(state, _tree.copy(self.metrics.init()))

    def values(self, metrics: PyTree) -> PyTree:
        """Returns what its metrics come to."""
        return self.metrics.compute(metrics)

    def __call__(self, metered: Metered, batch: PyTree, /) -> tuple[Metered, PyTree]:
        """Takes one step and updates the metrics with it."""
        if not isinstance(metered, Metered):
            raise TypeError(
                f"expected Metered(state, metrics), got {type(metered).__name__}. This step "
                "carries metrics: begin with step.start(state). fit and run do that for a step "
                "as train_step returns it; jit, vmap or partial around it hide its metrics."
            )
        key = () if self.rng is None else (jax.random.fold_in(self.rng, metered.metrics[_BATCHES]),)
        state, loss, aux = self.base(metered.state, batch, *key)
        metrics = updated(self.metrics, metered.metrics, batch, aux.outputs, loss, aux.weight)
        if self.trains and isinstance(state, TrainState):
            finite, _ = guards(state.opt_state)
            if finite is not None:  # what a skipped step says is no part of a mean
                metrics = _tree.select(finite, metrics, metered.metrics)
        values = {}  # those of an evaluation are reported without logs
        if self.trains:
            values = jax.eval_shape(self.metrics.compute, metrics)
            _tree.check_scalars(values)
        return Metered(state, metrics), _logs(loss, aux, values)


# The log of ``Aux.weight``: means over the steps of an epoch are weighted by it.
SUM_OF_WEIGHTS = "sum_of_weights"

_BATCHES = "(batches)"  # no name for a metric


def _counted(metric: Metric) -> Metric:
    """Counts batches beside the states of a dict of metrics, which is no value of theirs."""

    def update(
        m: PyTree, batch: PyTree, outputs: PyTree, loss: jax.Array, weight: Any = None
    ) -> PyTree:
        new = updated(metric, m, batch, outputs, loss, weight)
        return {**new, _BATCHES: m[_BATCHES] + 1}

    return Metric(lambda: {**metric.init(), _BATCHES: jnp.int32(0)}, update, metric.compute)


def plain(base: Callable[[Any, PyTree], tuple[Any, jax.Array, Aux]]) -> Step[Any]:
    """Returns the step without metrics, over the bare state."""

    def step(state: PyTree, batch: PyTree, /) -> tuple[PyTree, PyTree]:
        if isinstance(state, Metered):
            raise TypeError(
                "state: expected a bare state, got Metered. Take metered.state, or give train_step "
                "the metrics= too."
            )
        state, loss, aux = base(state, batch)
        return state, _logs(loss, aux)

    return step


def _logs(loss: jax.Array, aux: Aux, values: PyTree = ()) -> dict[str, Any]:
    """Returns what a step reports; refuses one name for two things, as one would hide the other."""
    logs, metrics = ({path for path, _ in _tree.leaves_with_path(x)} for x in (aux.logs, values))
    if own := {"loss", "seconds", SUM_OF_WEIGHTS} & logs:
        raise ValueError(
            f"logs: expected names other than {sorted(own)}, which the loop reports itself. Rename "
            "them in Aux(logs=...)."
        )
    if both := logs & metrics:
        raise ValueError(
            f"logs: expected names other than those of the metrics, got {sorted(both)} as logs of "
            "the loss and as metrics. Rename the log in Aux(logs=...), or the metric."
        )
    is_weighted = not (aux.weight is None or isinstance(aux.weight, tuple))
    weight = {SUM_OF_WEIGHTS: jnp.asarray(aux.weight, jnp.float32)} if is_weighted else {}
    return {"loss": loss, **weight, **aux.logs}


def check_names(metrics: Mapping[str, Metric] | None) -> None:
    """Refuses names that the loop itself uses."""
    taken = {"loss", "learning_rate", "seconds", SUM_OF_WEIGHTS} & set(metrics or {})
    if taken:
        raise ValueError(
            f"metrics: expected names other than {sorted(taken)}, which the loop reports itself. "
            "Choose another name."
        )
