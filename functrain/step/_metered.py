"""Steps that carry running metrics, and steps that do not."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _repr, _tree
from functrain.common._checks import require_instance
from functrain.common._types import PyTree, Step, StepTraits
from functrain.metrics._metric import Metered, Metric, update_metric
from functrain.step._check import refuse_names
from functrain.step._loss import Aux
from functrain.step._state import TrainState
from functrain.tx._guards import finite_and_scale


@dataclasses.dataclass(frozen=True, eq=False)
class MeteredStep(StepTraits):
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

    def __post_init__(self) -> None:
        if self.rng is not None:
            object.__setattr__(self, "metrics", _counted(self.metrics))

    def __repr__(self) -> str:
        return _repr.call(self, base=self.base, trains=self.trains)

    def wrap_state(self, state: PyTree) -> Metered:
        """Returns a bare state with metrics that have seen nothing, a started one as it is."""
        return state if isinstance(state, Metered) else self.start(state)

    def start(self, state: PyTree) -> Metered:
        """Returns the state with metrics that have seen nothing."""
        _require_bare(state, "It has been started already.")
        return Metered(state, _tree.copy(self.metrics.init()))

    def values(self, metrics: PyTree) -> PyTree:
        """Returns what its metrics come to."""
        return self.metrics.compute(metrics)

    def __call__(self, metered: Metered, batch: PyTree, /) -> tuple[Metered, PyTree]:
        """Takes one step and updates the metrics with it."""
        advice = (
            "This step carries metrics: begin with step.start(state). fit and run do that for a "
            "step as train_step returns it; jit, vmap or partial around it hide its metrics."
        )
        require_instance("state", metered, Metered, "Metered(state, metrics)", advice)
        key = () if self.rng is None else (jax.random.fold_in(self.rng, metered.metrics[_BATCHES]),)
        state, loss, aux = self.base(metered.state, batch, *key)
        metrics = update_metric(self.metrics, metered.metrics, batch, aux.outputs, loss, aux.weight)
        if self.trains and isinstance(state, TrainState):
            finite, _ = finite_and_scale(state.opt_state)
            if finite is not None:  # what a skipped step says is no part of a mean
                metrics = _tree.select(finite, metrics, metered.metrics)
        # The values of an evaluation are reported without logs.
        values = jax.eval_shape(self.metrics.compute, metrics) if self.trains else {}
        _tree.require_scalars(values)
        return Metered(state, metrics), _logs(loss, aux, values)


# The log of ``Aux.weight``: means over the steps of an epoch are weighted by it.
SUM_OF_WEIGHTS = "sum_of_weights"
_OF_THE_LOOP = ("loss", "seconds", SUM_OF_WEIGHTS)  # what it reports itself

_BATCHES = "(batches)"  # no name for a metric


def _counted(metric: Metric) -> Metric:
    """Counts batches beside the states of a dict of metrics, which is no value of theirs."""

    def update(m: PyTree, batch: PyTree, outputs: PyTree, loss: Any, weight: Any = None) -> Any:
        new = update_metric(metric, m, batch, outputs, loss, weight)
        return {**new, _BATCHES: m[_BATCHES] + 1}

    return Metric(lambda: {**metric.init(), _BATCHES: jnp.int32(0)}, update, metric.compute)


def plain(base: Callable[[Any, PyTree], tuple[Any, jax.Array, Aux]]) -> Step[Any]:
    """Returns the step without metrics, over the bare state."""

    def step(state: PyTree, batch: PyTree, /) -> tuple[PyTree, PyTree]:
        _require_bare(state, "Take metered.state, or give train_step the metrics= too.")
        state, loss, aux = base(state, batch)
        return state, _logs(loss, aux)

    return step


def _require_bare(state: PyTree, advice: str) -> None:
    if isinstance(state, Metered):
        raise TypeError(f"state: expected a bare state, got Metered. {advice}")


def _logs(loss: jax.Array, aux: Aux, values: PyTree = ()) -> dict[str, Any]:
    """Returns what a step reports; refuses one name for two things, as one would hide the other."""
    logs, metrics = ({path for path, _ in _tree.leaves_with_path(x)} for x in (aux.logs, values))
    refuse_names("logs", logs, _OF_THE_LOOP, "the loop")
    refuse_names("logs", logs, metrics, "the metrics")
    is_weighted = not (aux.weight is None or isinstance(aux.weight, tuple))
    weight = {SUM_OF_WEIGHTS: jnp.asarray(aux.weight, jnp.float32)} if is_weighted else {}
    return {"loss": loss, **weight, **aux.logs}


def check_names(metrics: Mapping[str, Metric] | None) -> None:
    """Refuses names that the loop itself uses."""
    refuse_names("metrics", metrics or (), ["learning_rate", *_OF_THE_LOOP], "the loop")
