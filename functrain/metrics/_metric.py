"""Metrics as triples of pure functions, and their values beside the training state."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _repr, _tree
from functrain.common._checks import require, require_instance
from functrain.common._types import PyTree
from functrain.data._batch import Part, expand_weight, select
from functrain.data._batches import example_count

_MAKE = (
    "Make one with functrain.metrics.accuracy(), bridge.metric or Metric(init, update, compute)."
)


class Metric(NamedTuple):
    """A running statistic, as three pure functions.

    Attributes:
      init: ``init() -> m``. Returns the state of the metric before the first batch, a pytree of
        arrays.
      update: ``update(m, batch, aux, loss) -> m``. Adds a batch, with the `Aux` that the loss
        returned for it (the model's outputs are ``aux.outputs``), and the loss `f32[]`. The
        result has the structure, shapes and dtypes of `m`.
      compute: ``compute(m) -> f32[]``, or a dict of such scalars. Returns the current value; NaN
        before the first batch.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain import Aux
      >>> from functrain.metrics import accuracy
      >>> metric = accuracy()
      >>> m = metric.init()
      >>> batch = jnp.ones((2, 3)), jnp.array([1, 0])
      >>> m = metric.update(m, batch, Aux(outputs=jnp.array([[0.1, 0.9], [0.2, 0.8]])), None)
      >>> print(metric.compute(m))
      0.5
    """

    init: Callable[[], PyTree]
    update: Callable[..., PyTree]
    compute: Callable[[PyTree], Any]


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


def labels_of(batch: PyTree, aux: Any) -> PyTree:
    """Returns the labels that a loss reports, or the second part of a batch that is a tuple."""
    if aux.labels is not None:
        return aux.labels
    return batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None


def require_labels(y: PyTree) -> None:
    """Raises ValueError if a metric has no labels to compare with the outputs."""
    advice = (
        "Name the part of a dict batch, as in supervised(model, loss, inputs='image', "
        "labels='label') or accuracy(labels='label'), or return functrain.Aux(labels=...)."
    )
    require(y is not None, "labels", "labels to compare with the outputs", y, advice)


def mean(
    value: Callable[[PyTree, PyTree], jax.Array],
    *,
    weighted: bool = True,
    labels: Part | None = None,
    where: Callable[[PyTree, PyTree], jax.Array] | None = None,
) -> Metric:
    """Returns the metric of the mean of a value over all examples.

    Args:
      value: ``value(outputs, y) -> [B, ...]``, any real dtype: the values of the examples. A scalar
        is their mean, and counts once for each example. `y` are the labels.
      weighted: True weights the values as the loss did, by ``Aux.sample_weight``: examples that a
        mask hides do not count. False counts all alike.
      labels: The part of a batch that has the labels: a key, a path or a function, as in
        `functrain.supervised`. With None, they are ``Aux.labels``, which `supervised` sets, or else
        the second part of a batch that is a tuple, or None.
      where: ``where(outputs, y) -> bool``, of a shape that broadcasts to that of the values: only
        values where it is True count, such as the returns of episodes that have ended. Other values
        may be NaN. The mean of no values is NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain import Aux
      >>> bias = mean(lambda outputs, y: outputs - y)
      >>> aux = Aux(outputs=jnp.full(4, 0.5), labels=jnp.zeros(4))
      >>> print(bias.compute(bias.update(bias.init(), (), aux, None)))
      0.5
      >>> returns = mean(lambda out, y: out["return"], where=lambda out, y: out["done"])
      >>> aux = Aux(outputs={"return": jnp.array([7.0, 30.0]), "done": jnp.array([False, True])})
      >>> print(returns.compute(returns.update(returns.init(), (), aux, None)))
      30.0
    """

    def update(m: _Sum, batch: PyTree, aux: Any, loss: jax.Array) -> _Sum:
        outputs = aux.outputs
        y = labels_of(batch, aux) if labels is None else select(batch, labels, "labels")
        # The sums are float32 for every dtype of the outputs: a scan keeps the dtypes of its carry.
        values = jnp.asarray(value(outputs, y)).astype(jnp.float32)
        weight = jnp.full_like(values, 1 if values.ndim else _count_examples(batch, aux))
        # A scalar is the mean over a batch already.
        if weighted and values.ndim and aux.sample_weight is not None:
            advice = "Pass weighted=False, or weights that fit to the metric in Aux.sample_weight."
            is_array = _tree.is_array(aux.sample_weight)
            require(is_array, "sample_weight", "one array", aux.sample_weight, advice)
            weight *= expand_weight(jnp.asarray(aux.sample_weight).astype(jnp.float32), values)
        if where is not None:
            counts = jnp.broadcast_to(where(outputs, y), values.shape)
            # Not a product with 0, which keeps a NaN.
            values, weight = jnp.where(counts, values, 0.0), jnp.where(counts, weight, 0.0)
        return m.add(jnp.sum(values * weight), jnp.sum(weight))

    return Metric(_zero, update, _ratio)


def _count_examples(batch: PyTree, aux: Any) -> Any:
    """Returns the number of examples of a batch, or what a loss says of it in its Aux, else 1.

    Raises:
      ValueError: The leaves of the batch have different lengths, and nothing else tells the number.
    """
    count = example_count(batch)
    if count is None and aux.labels is not None:
        count = example_count(aux.labels)
    has_weight = aux.weight is not None and not isinstance(aux.weight, tuple)
    if count is None and has_weight:
        return aux.weight
    if count is None and any(map(np.ndim, jax.tree.leaves(batch))):
        raise ValueError(
            "batch: expected arrays that share their first axis, that of the examples, got\n"
            f"{_tree.format_leaves(batch)}\nReturn the number that the loss was divided by, "
            "Aux(model_state, weight=number)."
        )
    return 1 if count is None else count


def mean_loss() -> Metric:
    """Returns the metric of the mean loss over all examples, for any batch sizes.

    The loss of a batch is weighted by the number of its examples, or by ``Aux.weight``: the number
    that the loss was divided by, such as the sum of the sample weights. A loss that is not a mean,
    such as a sum, is weighted by the number of examples too, as in Keras.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain import Aux
      >>> metric = mean_loss()
      >>> m = metric.update(metric.init(), jnp.ones((3, 2)), Aux(), jnp.float32(2.0))
      >>> print(metric.compute(metric.update(m, jnp.ones((1, 2)), Aux(), jnp.float32(6.0))))
      3.0
    """

    def update(m: _Sum, batch: PyTree, aux: Any, loss: jax.Array) -> _Sum:
        # `Aux.weight` is () for a loss that is not a mean.
        counts_examples = aux.weight is None or isinstance(aux.weight, tuple)
        weight = _count_examples(batch, aux) if counts_examples else aux.weight
        divisor = jnp.asarray(weight, jnp.float32)
        # The mean of a batch whose weights are all 0 may be 0 / 0, which must not reach the sum.
        total = jnp.where(divisor == 0, 0.0, loss.astype(jnp.float32) * divisor)
        return m.add(total, divisor)

    return Metric(_zero, update, _ratio)


def collection(metrics: Mapping[str, Metric]) -> Metric:
    """Returns several metrics as one, whose states and values are dicts by name.

    Raises:
      TypeError: `metrics` is not a mapping, or a value in it is not a Metric.

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

    def init() -> Any:
        return {name: metric.init() for name, metric in metrics.items()}

    def update(m: PyTree, batch: PyTree, aux: Any, loss: jax.Array) -> Any:
        return {name: x.update(m[name], batch, aux, loss) for name, x in metrics.items()}

    def compute(m: PyTree) -> Any:
        return {name: metric.compute(m[name]) for name, metric in metrics.items()}

    return Metric(init, update, compute)


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
