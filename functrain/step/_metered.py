"""Steps that carry running metrics, and steps that do not."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from functrain.common import _tree
from functrain.common._types import PyTree, Step
from functrain.metrics._metric import Metered, Metric
from functrain.step._loss import Aux


@dataclasses.dataclass(frozen=True, eq=False)
class MeteredStep:
    """A step over `Metered(state, metrics)` that knows its metrics.

    Attributes:
      base: ``(state, batch) -> (state, loss f32[], Aux)``.
      metrics: The metrics as one `Metric`; its `compute` returns a dict.
      trains: Whether it changes the state; `evaluate` takes those only that do not.

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


def plain(base: Callable[[Any, PyTree], tuple[Any, jax.Array, Aux]]) -> Step[Any]:
    """Returns the step without metrics, over the bare state."""

    def step(state: PyTree, batch: PyTree, /) -> tuple[PyTree, PyTree]:
        if isinstance(state, Metered):
            raise TypeError("expected a bare state, got Metered: give the step `metrics=` too")
        state, loss, aux = base(state, batch)
        return state, {"loss": loss, **aux.logs}

    return step


def check_names(metrics: Mapping[str, Metric] | None) -> None:
    """Refuses names that the loop itself uses."""
    taken = {"loss", "learning_rate", "seconds"} & set(metrics or {})
    if taken:
        raise ValueError(
            f"metrics: expected names other than {sorted(taken)}, which the loop reports itself. "
            "Choose another name."
        )
