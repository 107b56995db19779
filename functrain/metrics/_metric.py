"""Metrics as triples of pure functions, carried beside the state."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from functrain.common import _repr
from functrain.common._arguments import parameters
from functrain.common._checks import require_instance
from functrain.common._types import PyTree
from functrain.data._batch import batch_size, expand_weight

_MAKE = (
    "Make one with functrain.metrics.accuracy() and the like, of Keras's with bridge.metric(...), "
    "or with Metric(init, update, compute)."
)


class Metric(NamedTuple):
    """A running statistic.

    Attributes:
      init: ``init() -> m``: a pytree of arrays, before the first batch.
      update: ``update(m, batch, outputs, loss) -> m``: takes in a batch, the model's outputs on
        it and its loss `f32[]`. Returns the structure, shapes and dtypes of `m`. An `update` with
        a parameter `weight` is given ``Aux.weight`` by that name, unless that is None and the
        parameter has a default.
      compute: ``compute(m) -> f32[] or a dict of them``: the value so far; NaN before any batch.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain.metrics import accuracy
      >>> metric = accuracy()
      >>> m = metric.init()
      >>> batch = jnp.ones((2, 3)), jnp.array([1, 0])
      >>> m = metric.update(m, batch, jnp.array([[0.1, 0.9], [0.2, 0.8]]), None)
      >>> print(metric.compute(m))
      0.5
    """

    init: Callable[[], PyTree]
    update: Callable[..., PyTree]
    compute: Callable[[PyTree], Any]


def updated(
    metric: Metric, m: PyTree, batch: PyTree, outputs: PyTree, loss: jax.Array, weight: Any
) -> PyTree:
    """Returns a metric's state after one more batch.

    Args:
      metric: The metric.
      m: Its state before the batch.
      batch: The batch.
      outputs: The model's outputs on it.
      loss: Its loss `f32[]`.
      weight: ``Aux.weight``, passed on to an `update` that has a parameter of that name. Where it
        is None, the parameter's own default stays.
    """
    parameter = parameters(metric.update).get("weight")
    if parameter is None or (weight is None and parameter.default is not parameter.empty):
        return metric.update(m, batch, outputs, loss)
    return metric.update(m, batch, outputs, loss, weight=weight)


class Metered(flax.struct.PyTreeNode, eq=False):
    """A state with running metrics beside it, the carry of a step that was given `metrics=`.

    Attributes:
      state: What is trained; untouched by adding, resetting or dropping metrics.
      metrics: The running metrics.

    Examples:
      >>> metered = Metered({"w": 1.0}, collection({"loss": mean_loss()}).init())
      >>> sorted(metered.metrics)
      ['loss']
    """

    state: PyTree
    metrics: PyTree

    def __repr__(self) -> str:
        return f"Metered(state={self.state!r}, metrics={_repr.brief(self.metrics)})"


class _Sum(NamedTuple):
    total: jax.Array  # f32[]
    weight: jax.Array  # f32[]


def mean(value: Callable[[PyTree, PyTree], jax.Array], *, weighted: bool = False) -> Metric:
    """Returns the mean over all examples of what `value` makes of each.

    Args:
      value: ``value(outputs, y) -> [B, ...]``, any real dtype.
      weighted: Weigh each example by the batch's `sample_weight`, where it has one.

    Examples:
      >>> import jax.numpy as jnp
      >>> bias = mean(lambda outputs, y: outputs - y)
      >>> batch = None, jnp.zeros(4)
      >>> print(bias.compute(bias.update(bias.init(), batch, jnp.full(4, 0.5), None)))
      0.5
    """

    def update(m: _Sum, batch: PyTree, outputs: PyTree, loss: jax.Array) -> _Sum:
        values = jnp.asarray(value(outputs, batch[1])).astype(jnp.float32)
        weight = jnp.ones_like(values)
        if weighted and len(batch) == 3:
            weight *= expand_weight(jnp.asarray(batch[2]).astype(jnp.float32), values)
        return _Sum(m.total + jnp.sum(values * weight), m.weight + jnp.sum(weight))

    return Metric(_zero, update, _ratio)


def mean_loss() -> Metric:
    """Returns the mean loss over all examples, whatever the batch size.

    A batch counts by its number of examples. Where the loss was divided by something else, such as
    the sum of the sample weights, it counts by that: see ``Aux.weight``. A loss that is no mean,
    such as a sum, is averaged over batches by their examples, as in Keras.

    Examples:
      >>> import jax.numpy as jnp
      >>> metric = mean_loss()
      >>> m = metric.update(metric.init(), (jnp.ones((3, 2)), None), None, jnp.float32(2.0))
      >>> print(metric.compute(metric.update(m, (jnp.ones((1, 2)), None), None, jnp.float32(6.0))))
      3.0
    """

    def update(m: _Sum, batch: PyTree, outputs: PyTree, loss: Any, weight: Any = None) -> _Sum:
        is_by_examples = weight is None or isinstance(weight, tuple)
        divisor = jnp.asarray(batch_size(batch) if is_by_examples else weight, jnp.float32)
        # The mean of a batch without weight may be 0 / 0, which must not reach the sum.
        total = jnp.where(divisor == 0, 0.0, loss.astype(jnp.float32) * divisor)
        return _Sum(m.total + total, m.weight + divisor)

    return Metric(_zero, update, _ratio)


def collection(metrics: Mapping[str, Metric]) -> Metric:
    """Returns one metric of many: its states and its values are dicts under their names.

    Examples:
      >>> from functrain.metrics import accuracy
      >>> both = collection({"loss": mean_loss(), "accuracy": accuracy()})
      >>> sorted(both.init())
      ['accuracy', 'loss']
    """
    advice = "For example {'accuracy': functrain.metrics.accuracy()}."
    require_instance("metrics", metrics, Mapping, "a dict of Metrics by name", advice)
    metrics = dict(metrics)
    for name, metric in metrics.items():
        advice = f"Call it: {_repr.name(metric)}(...)." if inspect.isfunction(metric) else _MAKE
        require_instance(f"metrics[{name!r}]", metric, Metric, "a Metric", advice)

    def update(m: PyTree, batch: PyTree, outputs: PyTree, loss: Any, weight: Any = None) -> Any:
        return {n: updated(metrics[n], m[n], batch, outputs, loss, weight) for n in metrics}

    return Metric(
        init=lambda: {n: metrics[n].init() for n in metrics},
        update=update,
        compute=lambda m: {n: metrics[n].compute(m[n]) for n in metrics},
    )


def _zero() -> _Sum:
    return _Sum(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def _ratio(m: _Sum) -> jax.Array:
    return m.total / m.weight
