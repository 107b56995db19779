"""Metrics as triples of pure functions, carried beside the state."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from functrain._loss import expand_weight
from functrain._types import PyTree


class Metric(NamedTuple):
    """A running statistic.

    Attributes:
      init: ``init() -> m``: a pytree of arrays, before the first batch.
      update: ``update(m, batch, outputs, loss) -> m``: takes in a batch, the model's outputs on
        it and its loss `f32[]`. Same structure, shapes and dtypes as `m`.
      compute: ``compute(m) -> f32[] or a dict of them``: the value so far; NaN before any batch.

    Examples:
      >>> import jax.numpy as jnp
      >>> metric = accuracy()
      >>> m = metric.init()
      >>> batch = jnp.ones((2, 3)), jnp.array([1, 0])
      >>> m = metric.update(m, batch, jnp.array([[0.1, 0.9], [0.2, 0.8]]), None)
      >>> print(metric.compute(m))
      0.5
    """

    init: Callable[[], PyTree]
    update: Callable[[PyTree, PyTree, PyTree, jax.Array], PyTree]
    compute: Callable[[PyTree], Any]


class Metered(flax.struct.PyTreeNode):
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
    """Returns the mean loss, each batch weighted by its number of examples, as Keras has it.

    Examples:
      >>> import jax.numpy as jnp
      >>> metric = mean_loss()
      >>> m = metric.update(metric.init(), (jnp.ones((3, 2)), None), None, jnp.float32(2.0))
      >>> print(metric.compute(metric.update(m, (jnp.ones((1, 2)), None), None, jnp.float32(6.0))))
      3.0
    """

    def update(m: _Sum, batch: PyTree, outputs: PyTree, loss: jax.Array) -> _Sum:
        size = jnp.asarray(batch_size(batch), jnp.float32)
        return _Sum(m.total + loss.astype(jnp.float32) * size, m.weight + size)

    return Metric(_zero, update, _ratio)


def accuracy(*, weighted: bool = False) -> Metric:
    """Returns how often the largest output is the label's.

    Outputs are scores `[B, ..., C]`, labels classes `i[B, ...]` (or `[B, ..., 1]`), or one-hot
    `[B, ..., C]`.

    Examples:
      >>> import jax.numpy as jnp
      >>> metric = accuracy()
      >>> batch = None, jnp.array([0, 1, 1])
      >>> scores = jnp.array([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
      >>> print(round(float(metric.compute(metric.update(metric.init(), batch, scores, None))), 3))
      0.667
    """
    return mean(
        lambda outputs, y: jnp.argmax(outputs, axis=-1) == _classes(outputs, y), weighted=weighted
    )


def top_k_accuracy(k: int = 5, *, weighted: bool = False) -> Metric:
    """Returns how often the label is among the `k` largest outputs; shapes as in `accuracy`.

    Ties count for the label, as they do in Keras.

    Examples:
      >>> import jax.numpy as jnp
      >>> metric = top_k_accuracy(2)
      >>> batch = None, jnp.array([0, 1])
      >>> scores = jnp.array([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]])
      >>> print(metric.compute(metric.update(metric.init(), batch, scores, None)))
      0.5
    """

    def hit(outputs: jax.Array, y: jax.Array) -> jax.Array:
        # Counting what is larger takes one pass; a sort is slow on CPU.
        label = _classes(outputs, y)[..., None]
        score = jnp.take_along_axis(outputs, label, axis=-1)
        return jnp.sum((outputs > score).astype(jnp.int32), axis=-1) < k

    return mean(hit, weighted=weighted)


def binary_accuracy(threshold: float = 0.5, *, weighted: bool = False) -> Metric:
    """Returns how often ``outputs > threshold`` is the label, 0 or 1.

    For logits take ``threshold=0.0``. Outputs are `[B]` or `[B, 1]`, and so are labels.

    Examples:
      >>> import jax.numpy as jnp
      >>> metric = binary_accuracy(threshold=0.0)
      >>> batch = None, jnp.array([1, 1])
      >>> logits = jnp.array([[3.0], [-1.0]])
      >>> print(metric.compute(metric.update(metric.init(), batch, logits, None)))
      0.5
    """
    return mean(
        lambda outputs, y: (outputs > threshold) == (_like(y, outputs) > 0), weighted=weighted
    )


def mean_squared_error(*, weighted: bool = False) -> Metric:
    """Returns the mean of ``(outputs - y)²`` over all elements.

    Examples:
      >>> import jax.numpy as jnp
      >>> metric = mean_squared_error()
      >>> batch = None, jnp.array([[1.0], [3.0]])
      >>> print(metric.compute(metric.update(metric.init(), batch, jnp.ones((2, 1)), None)))
      2.0
    """
    return mean(lambda outputs, y: _error(outputs, y) ** 2, weighted=weighted)


def mean_absolute_error(*, weighted: bool = False) -> Metric:
    """Returns the mean of ``|outputs - y|`` over all elements.

    Examples:
      >>> import jax.numpy as jnp
      >>> metric = mean_absolute_error()
      >>> batch = None, jnp.array([[1.0], [3.0]])
      >>> print(metric.compute(metric.update(metric.init(), batch, jnp.ones((2, 1)), None)))
      1.0
    """
    return mean(lambda outputs, y: jnp.abs(_error(outputs, y)), weighted=weighted)


def collection(metrics: Mapping[str, Metric]) -> Metric:
    """Returns one metric of many: its states and its values are dicts under their names.

    Examples:
      >>> both = collection({"loss": mean_loss(), "accuracy": accuracy()})
      >>> sorted(both.init())
      ['accuracy', 'loss']
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "metrics: expected a dict of Metrics by name, such as {'accuracy': "
            f"functrain.accuracy()}}, got {type(metrics).__name__}"
        )
    metrics = dict(metrics)
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise TypeError(
                f"metrics[{name!r}]: expected a Metric, got {type(metric).__name__}. Make one "
                "with functrain.accuracy() and the like, or Metric(init, update, compute)."
            )

    def update(m: PyTree, batch: PyTree, outputs: PyTree, loss: jax.Array) -> PyTree:
        return {n: metrics[n].update(m[n], batch, outputs, loss) for n in metrics}

    return Metric(
        init=lambda: {n: metrics[n].init() for n in metrics},
        update=update,
        compute=lambda m: {n: metrics[n].compute(m[n]) for n in metrics},
    )


def batch_size(batch: PyTree) -> int:
    """Returns the number of examples: the first axis of the first leaf that has one."""
    return next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)), 1)


def _zero() -> _Sum:
    return _Sum(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def _ratio(m: _Sum) -> jax.Array:
    return m.total / m.weight


def _classes(outputs: jax.Array, y: jax.Array) -> jax.Array:
    """Returns labels as classes `i[B, ...]`, from classes or from one-hot rows."""
    y = jnp.asarray(y)
    if y.ndim == outputs.ndim and y.shape[-1] == outputs.shape[-1] > 1:
        return jnp.argmax(y, axis=-1)
    return _like(y, outputs[..., 0]).astype(jnp.int32)


def _like(y: jax.Array, outputs: jax.Array) -> jax.Array:
    """Gives labels the shape of outputs that differ from them by axes of length one."""
    y = jnp.asarray(y)
    if y.size != outputs.size or y.shape[:1] != outputs.shape[:1]:
        raise ValueError(f"labels: expected the shape of outputs {outputs.shape}, got {y.shape}")
    return y.reshape(outputs.shape)


def _error(outputs: jax.Array, y: jax.Array) -> jax.Array:
    return outputs.astype(jnp.float32) - _like(y, outputs).astype(jnp.float32)
