"""Metrics that compare outputs with labels: classes hit, and distances."""

from typing import Any

import jax
import jax.numpy as jnp

from functrain.common._checks import require
from functrain.metrics._metric import Metric, mean


def accuracy(*, weighted: bool = False) -> Metric:
    """Returns how often the largest output is the label's.

    Outputs are scores `[B, ..., C]` of at least two classes, labels classes `i[B, ...]` (or
    `[B, ..., 1]`), or one-hot `[B, ..., C]`.

    Raises:
      ValueError: (when traced) there is one score an example: see `binary_accuracy`.

    Examples:
      >>> import jax.numpy as jnp
      >>> metric = accuracy()
      >>> batch = None, jnp.array([0, 1, 1])
      >>> scores = jnp.array([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
      >>> print(round(float(metric.compute(metric.update(metric.init(), batch, scores, None))), 3))
      0.667
    """

    def hit(outputs: jax.Array, y: jax.Array) -> jax.Array:
        _require_scores(outputs, "accuracy")
        return jnp.argmax(outputs, axis=-1) == _classes(outputs, y)

    return mean(hit, weighted=weighted)


def top_k_accuracy(k: int = 5, *, weighted: bool = False) -> Metric:
    """Returns how often the label is among the `k` largest outputs; shapes as in `accuracy`.

    Ties count for the label, as they do in Keras. An output of NaN is larger than all others, as
    it is to `argmax`, and never a hit; nor is a label that is no class.

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
        _require_scores(outputs, "top_k_accuracy")
        label = _classes(outputs, y)
        score = jnp.take_along_axis(outputs, label[..., None], axis=-1, mode="clip")
        larger = jnp.sum((~(outputs <= score)).astype(jnp.int32), axis=-1)
        a_class = (label >= 0) & (label < outputs.shape[-1])
        return (larger < k) & a_class & ~jnp.isnan(score[..., 0])

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


def _require_scores(outputs: Any, name: str) -> None:
    """Raises ValueError unless there is a score for each of several classes.

    The largest of one column is always the first, so that every label 0 would be a hit.
    """
    has_several = jnp.ndim(outputs) >= 2 and outputs.shape[-1] >= 2
    advice = (
        "For one score an example take functrain.metrics.binary_accuracy(threshold=0.5), or "
        "threshold=0.0 for logits."
    )
    require(has_several, name, "scores [B, ..., C] of at least two classes", outputs, advice)


def _classes(outputs: jax.Array, y: jax.Array) -> jax.Array:
    """Returns labels as classes `i[B, ...]`, from classes or from one-hot rows."""
    y = jnp.asarray(y)
    if y.ndim == outputs.ndim and y.shape[-1] == outputs.shape[-1] > 1:
        return jnp.argmax(y, axis=-1)
    return _like(y, outputs[..., 0]).astype(jnp.int32)


def _error(outputs: jax.Array, y: jax.Array) -> jax.Array:
    return outputs.astype(jnp.float32) - _like(y, outputs).astype(jnp.float32)


def _like(y: jax.Array, outputs: jax.Array) -> jax.Array:
    """Gives labels the shape of outputs that differ from them by axes of length one."""
    y = jnp.asarray(y)
    fits = y.size == outputs.size and y.shape[:1] == outputs.shape[:1]
    require(fits, "labels", f"the shape of outputs {outputs.shape}", y.shape)
    return y.reshape(outputs.shape)
