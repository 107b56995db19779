"""Steps with and without running metrics."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _repr, _tree
from functrain.common._checks import require_instance, require_no_problems
from functrain.common._log_values import SumOfWeights
from functrain.common._types import PyTree, StepTraits
from functrain.metrics._metric import Metered, Metric
from functrain.step._check import require_distinct_names
from functrain.step._loss import Aux
from functrain.step._state import TrainState
from functrain.tx._guards import taken_and_scale

# The parentheses keep this key apart from the names of metrics.
BATCH_COUNT = "(batches)"


@dataclasses.dataclass(frozen=True, eq=False)
class MeteredStep(StepTraits):
    """A step over `Metered(state, metrics)`, with its metrics as an attribute.

    Attributes:
      base: ``(state, batch) -> (state, loss f32[], Aux)``; with an `rng`, ``(state, batch, key)``.
      metrics: The metrics as one `Metric`; its `compute` returns a dict.
      trains: True if the step changes the state. `evaluate` takes only steps that do not.
      rng: A key `key[]` for a base that draws random numbers, or None. Batch number i, which
        the metrics count as `BATCH_COUNT`, gets ``fold_in(rng, i)``.

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

    def __repr__(self) -> str:
        return _repr.call(self, base=self.base, trains=self.trains)

    def wrap_state(self, state: PyTree) -> Metered:
        """Returns the state with empty metrics, unless it has metrics already."""
        return state if isinstance(state, Metered) else self.start(state)

    def start(self, state: PyTree) -> Metered:
        """Returns the state with metrics that have seen no batch."""
        # An init may return one array twice. A buffer that two leaves share cannot be donated.
        # Under `jax.transfer_guard`, the zeros that it makes are no mistake.
        with jax.transfer_guard_host_to_device("allow"):
            return Metered(state, _tree.copy(self.metrics.init()))

    def values(self, metrics: PyTree) -> PyTree:
        """Returns the values of the metrics so far."""
        return self.metrics.compute(metrics)

    def __call__(self, metered: Metered, batch: PyTree, /) -> tuple[Metered, PyTree]:
        """Takes one step and updates the metrics."""
        advice = (
            "Begin with step.start(state). A function around this step hides its metrics: return "
            "further logs from the loss, in Aux(logs=), or wrap a step without metrics."
        )
        require_instance("state", metered, Metered, "Metered(state, metrics)", advice)
        args = [metered.state, batch]
        if self.rng is not None:
            args.append(jax.random.fold_in(self.rng, metered.metrics[BATCH_COUNT]))
        state, loss, aux = self.base(*args)
        metrics = self._update_metrics(metered.metrics, batch, aux, loss)
        if self.trains and isinstance(state, TrainState):
            taken, _ = taken_and_scale(state.opt_state)
            # With `skip_non_finite`, a step that was skipped does not count in the metrics.
            if taken is not None:
                metrics = _tree.select(taken, metrics, metered.metrics)
        # Only training reports logs and metrics together, so only there can their names clash.
        values = jax.eval_shape(self.metrics.compute, metrics) if self.trains else {}
        _tree.require_scalars(values)
        return Metered(state, metrics), logs_of(loss, aux, values)

    def _update_metrics(self, metrics: PyTree, batch: PyTree, aux: Aux, loss: jax.Array) -> PyTree:
        """Returns the metrics with a batch added; raises TypeError if they lose their structure."""
        with jax.named_scope("metrics"):
            updated = self.metrics.update(metrics, batch, aux, loss)
        changes = _tree.differences(metrics, updated)
        expected = "from update the structure, shapes and dtypes that init returned"
        advice = "Cast in update, as with x.astype(old.dtype), or begin with arrays of that dtype."
        require_no_problems("metrics", changes, expected, advice, error=TypeError)
        return updated


# The log of ``Aux.weight``: means over the steps of an epoch are weighted by it.
_SUM_OF_WEIGHTS = SumOfWeights("sum_of_weights")


def logs_of(loss: jax.Array, aux: Aux, values: PyTree = ()) -> dict[str, Any]:
    """Returns the logs of a step.

    Raises:
      ValueError: A log or a metric has the name of another.
    """
    logs = {"loss": loss}
    # An empty tuple stands for a loss that is not a mean.
    if not (aux.weight is None or isinstance(aux.weight, tuple)):
        logs[_SUM_OF_WEIGHTS] = jnp.asarray(aux.weight, jnp.float32)
    # Nested logs and metrics are reported under their paths, so the paths must differ.
    names = [path for tree in (logs, aux.logs, values) for path, _ in _tree.leaves_with_path(tree)]
    require_distinct_names("logs", names)
    return {**logs, **aux.logs}
