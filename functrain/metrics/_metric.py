"""Metrics as triples of pure functions, and their values beside the training state."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from functrain.common import _repr
from functrain.common._arguments import accepts, describe_signature, parameters
from functrain.common._checks import require_instance
from functrain.common._types import PyTree
from functrain.data._batch import batch_size, expand_weight

_MAKE = (
    "Make one with functrain.metrics.accuracy() or another function there, with "
    "bridge.metric(...) from a Keras metric, or with Metric(init, update, compute)."
)


class Metric(NamedTuple):
    """A running statistic, as three pure functions.

    Attributes:
      init: ``init() -> m``. Returns the state of the metric before the first batch, a pytree of
        arrays.
      update: ``update(m, batch, outputs, loss) -> m``. Adds a batch, with the model's outputs on
        it and its loss `f32[]`. The result has the structure, shapes and dtypes of `m`. If
        `update` has a parameter `weight`, it is passed ``Aux.weight``, unless that is None and the
        parameter has a default.
      compute: ``compute(m) -> f32[]``, or a dict of such scalars. Returns the current value; NaN
        before the first batch.

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


def update_metric(
    metric: Metric, m: PyTree, batch: PyTree, outputs: PyTree, loss: jax.Array, weight: Any
) -> PyTree:
    """Returns a metric's state after one more batch.

    Args:
      metric: The metric.
      m: Its state before the batch.
      batch: The batch.
      outputs: The model's outputs on it.
      loss: Its loss `f32[]`.
      weight: ``Aux.weight``. It is passed to an `update` that has a parameter of that name, unless
        it is None and the parameter has a default.
    """
    parameter = parameters(metric.update).get("weight")
    if parameter is None or (weight is None and parameter.default is not parameter.empty):
        return metric.update(m, batch, outputs, loss)
    return metric.update(m, batch, outputs, loss, weight=weight)


class Metered(flax.struct.PyTreeNode, eq=False):
    """A training state together with running metrics, for steps that were made with `metrics`.

    Attributes:
      state: The training state. Adding, resetting or removing metrics does not change it.
      metrics: The states of the running metrics, by name.

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
    """A weighted sum. Each number, `f32[]`, is kept with what rounding has taken from it."""

    total: tuple[jax.Array, jax.Array]
    weight: tuple[jax.Array, jax.Array]

    def add(self, total: jax.Array, weight: jax.Array) -> "_Sum":
        return _Sum(_add(self.total, total), _add(self.weight, weight))


def mean(
    value: Callable[[PyTree, PyTree], jax.Array],
    *,
    weighted: bool = False,
    where: Callable[[PyTree, PyTree], jax.Array] | None = None,
) -> Metric:
    """Returns the metric of the mean of a value over all examples.

    Args:
      value: ``value(outputs, y) -> [B, ...]``, any real dtype: the values of the examples. A scalar
        is their mean, and counts once for each example. `y` is the second item of a batch that is a
        tuple, and None for other batches.
      weighted: Weight each example by the batch's `sample_weight`, if it has one.
      where: ``where(outputs, y) -> bool``, of a shape that broadcasts to that of the values: only
        values where it is True count, such as the returns of episodes that have ended. Other values
        may be NaN. The mean of no values is NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> bias = mean(lambda outputs, y: outputs - y)
      >>> batch = None, jnp.zeros(4)
      >>> print(bias.compute(bias.update(bias.init(), batch, jnp.full(4, 0.5), None)))
      0.5
      >>> returns = mean(lambda out, y: out["return"], where=lambda out, y: out["done"])
      >>> outputs = {"return": jnp.array([7.0, 30.0]), "done": jnp.array([False, True])}
      >>> print(returns.compute(returns.update(returns.init(), (), outputs, None)))
      30.0
    """

    def update(m: _Sum, batch: PyTree, outputs: PyTree, loss: jax.Array) -> _Sum:
        parts = batch if isinstance(batch, tuple | list) else ()
        y = parts[1] if len(parts) > 1 else None
        # The sums are float32 for every dtype of the outputs: a scan keeps the dtypes of its carry.
        values = jnp.asarray(value(outputs, y)).astype(jnp.float32)
        weight = jnp.full_like(values, 1 if values.ndim else batch_size(batch))
        if weighted and len(parts) == 3 and parts[2] is not None:
            weight *= expand_weight(jnp.asarray(parts[2]).astype(jnp.float32), values)
        if where is not None:
            counts = jnp.broadcast_to(where(outputs, y), values.shape)
            # Not a product with 0, which keeps a NaN.
            values, weight = jnp.where(counts, values, 0.0), jnp.where(counts, weight, 0.0)
        return m.add(jnp.sum(values * weight), jnp.sum(weight))

    return Metric(_zero, update, _ratio)


def mean_loss() -> Metric:
    """Returns the metric of the mean loss over all examples, for any batch sizes.

    The loss of a batch is weighted by the number of its examples, or by ``Aux.weight``: the number
    that the loss was divided by, such as the sum of the sample weights. A loss that is not a mean,
    such as a sum, is weighted by the number of examples too, as in Keras.

    Examples:
      >>> import jax.numpy as jnp
      >>> metric = mean_loss()
      >>> m = metric.update(metric.init(), (jnp.ones((3, 2)), None), None, jnp.float32(2.0))
      >>> print(metric.compute(metric.update(m, (jnp.ones((1, 2)), None), None, jnp.float32(6.0))))
      3.0
    """

    def update(m: _Sum, batch: PyTree, outputs: PyTree, loss: Any, weight: Any = None) -> _Sum:
        # `Aux.weight` is () for a loss that is not a mean.
        counts_examples = weight is None or isinstance(weight, tuple)
        divisor = jnp.asarray(batch_size(batch) if counts_examples else weight, jnp.float32)
        # The mean of a batch whose weights are all 0 may be 0 / 0, which must not reach the sum.
        total = jnp.where(divisor == 0, 0.0, loss.astype(jnp.float32) * divisor)
        return m.add(total, divisor)

    return Metric(_zero, update, _ratio)


def collection(metrics: Mapping[str, Metric]) -> Metric:
    """Returns several metrics as one, whose states and values are dicts by name.

    Raises:
      TypeError: `metrics` is not a mapping, or a value in it is not a Metric, or cannot be called
        as one.

    Examples:
      >>> from functrain.metrics import accuracy
      >>> both = collection({"loss": mean_loss(), "accuracy": accuracy()})
      >>> sorted(both.init())
      ['accuracy', 'loss']
    """
    advice = "For example {'accuracy': functrain.metrics.accuracy()}."
    require_instance("metrics", metrics, Mapping, "a dict of Metrics by name", advice)
    # A copy: if the caller changes the mapping later, the metric must stay the same.
    metrics = dict(metrics)
    for name, metric in metrics.items():
        advice = f"Call it: {_repr.name(metric)}(...)." if inspect.isfunction(metric) else _MAKE
        require_instance(f"metrics[{name!r}]", metric, Metric, "a Metric", advice)
        _require_functions(f"metrics[{name!r}]", metric)

    def init() -> Any:
        return {name: metric.init() for name, metric in metrics.items()}

    def update(m: PyTree, batch: PyTree, outputs: PyTree, loss: Any, weight: Any = None) -> Any:
        args = batch, outputs, loss, weight
        return {name: update_metric(metric, m[name], *args) for name, metric in metrics.items()}

    def compute(m: PyTree) -> Any:
        return {name: metric.compute(m[name]) for name, metric in metrics.items()}

    return Metric(init, update, compute)


def _require_functions(name: str, metric: Metric) -> None:
    """Raises TypeError if a function of a metric has other parameters than it is called with."""
    weight = [name for name in ("weight",) if name in parameters(metric.update)]
    checks = (
        ("init", accepts(metric.init, 0), "init() -> m"),
        (
            "update",
            accepts(metric.update, 4, *weight),
            "update(m, batch, outputs, loss) -> m; with a parameter `weight`, it gets Aux.weight",
        ),
        ("compute", accepts(metric.compute, 1), "compute(m) -> a scalar"),
    )
    for field, is_accepted, expected in checks:
        if not is_accepted:
            got = describe_signature(getattr(metric, field))
            raise TypeError(f"{name}.{field}: expected {expected}, got {got}.")


def _zero() -> _Sum:
    # Four arrays, since a buffer of two leaves cannot be donated.
    zeros = [jnp.zeros((), jnp.float32) for _ in range(4)]
    return _Sum((zeros[0], zeros[1]), (zeros[2], zeros[3]))


def _add(number: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds `x` to a number and the rounding error to its second part."""
    # A float32 count that grows by the same batch size loses the same part of it in every step:
    # 96 of 100 examples are counted after 2**26.
    old, lost = number
    new = old + x
    added = new - old
    error = (old - (new - added)) + (x - added)
    # Infinity minus infinity is NaN.
    return new, lost + jnp.where(jnp.isfinite(new), error, 0.0)


def _ratio(m: _Sum) -> jax.Array:
    return jnp.add(*m.total) / jnp.add(*m.weight)
