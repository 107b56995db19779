"""Metrics that compare outputs with labels: accuracies and errors."""

from typing import Any

import jax
import jax.numpy as jnp

from functrain.common._checks import require, require_integer
from functrain.data._batch import Part
from functrain.metrics._metric import Metric, mean, require_labels


def accuracy(*, weighted: bool = True, labels: Part | None = None) -> Metric:
    """Returns the metric of how often the class with the largest output is the label.

    Outputs are scores `[B, ..., C]` of at least two classes. Labels are classes `i[B, ...]` (or
    `[B, ..., 1]`), or one-hot `[B, ..., C]`.

    Args:
      weighted: True weights the examples as the loss did, as in `mean`.
      labels: The part of a batch that has the labels, as in `mean`.

    Raises:
      ValueError: (from `update`) there is only one score per example: see `binary_accuracy`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain import Aux
      >>> metric = accuracy()
      >>> batch = None, jnp.array([0, 1, 1])
      >>> scores = jnp.array([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
      >>> m = metric.update(metric.init(), batch, Aux(outputs=scores), None)
      >>> print(round(float(metric.compute(m)), 3))
      0.667
    """

    def is_correct(outputs: jax.Array, y: jax.Array) -> jax.Array:
        _require_scores(outputs, "accuracy")
        return jnp.argmax(outputs, axis=-1) == _to_classes(outputs, y)

    return mean(is_correct, weighted=weighted, labels=labels)


def top_k_accuracy(k: int = 5, *, weighted: bool = True, labels: Part | None = None) -> Metric:
    """Returns the metric of how often the label is among the classes with the `k` largest outputs.

    Shapes are those of `accuracy`. A label whose score ties with others counts as larger than
    these, as in Keras. NaN counts as larger than every number, as in `argmax`. A label whose own
    score is NaN, or that is not a class, is never correct.

    Args:
      k: The number of classes that count.
      weighted: True weights the examples as the loss did, as in `mean`.
      labels: The part of a batch that has the labels, as in `mean`.

    Raises:
      ValueError: `k` is not an integer of at least 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain import Aux
      >>> metric = top_k_accuracy(2)
      >>> batch = None, jnp.array([0, 1])
      >>> scores = jnp.array([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]])
      >>> print(metric.compute(metric.update(metric.init(), batch, Aux(outputs=scores), None)))
      0.5
    """
    require_integer("k", k)

    def is_among_k_largest(outputs: jax.Array, y: jax.Array) -> jax.Array:
        _require_scores(outputs, "top_k_accuracy")
        classes = _to_classes(outputs, y)
        score = jnp.take_along_axis(outputs, classes[..., None], axis=-1, mode="clip")
        # Counting the larger scores takes one pass; `top_k` would sort, which is slow on CPU.
        # `~(a <= b)` instead of `a > b` counts NaN as larger.
        larger_scores = jnp.sum((~(outputs <= score)).astype(jnp.int32), axis=-1)
        is_class = (classes >= 0) & (classes < outputs.shape[-1])
        return (larger_scores < k) & is_class & ~jnp.isnan(score[..., 0])

    return mean(is_among_k_largest, weighted=weighted, labels=labels)


def binary_accuracy(
    threshold: float = 0.5, *, weighted: bool = True, labels: Part | None = None
) -> Metric:
    """Returns the metric of how often ``outputs > threshold`` equals the label, 0 or 1.

    Outputs are `[B]` or `[B, 1]`, and so are labels. A label above 0.5 counts as 1.

    Args:
      threshold: The output above which the prediction is 1. For logits use 0.0.
      weighted: True weights the examples as the loss did, as in `mean`.
      labels: The part of a batch that has the labels, as in `mean`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain import Aux
      >>> metric = binary_accuracy(threshold=0.0)
      >>> batch = None, jnp.array([1, 1])
      >>> logits = jnp.array([[3.0], [-1.0]])
      >>> print(metric.compute(metric.update(metric.init(), batch, Aux(outputs=logits), None)))
      0.5
    """

    def is_correct(outputs: jax.Array, y: jax.Array) -> jax.Array:
        # Smoothed labels, such as 0.05 and 0.95, are 0 and 1.
        return (outputs > threshold) == (_reshape_labels(y, outputs).astype(jnp.float32) > 0.5)

    return mean(is_correct, weighted=weighted, labels=labels)


def mean_squared_error(*, weighted: bool = True, labels: Part | None = None) -> Metric:
    """Returns the metric of the mean of ``(outputs - y)²`` over all elements.

    Args:
      weighted: True weights the examples as the loss did, as in `mean`.
      labels: The part of a batch that has the labels, as in `mean`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain import Aux
      >>> metric = mean_squared_error()
      >>> batch = None, jnp.array([[1.0], [3.0]])
      >>> aux = Aux(outputs=jnp.ones((2, 1)))
      >>> print(metric.compute(metric.update(metric.init(), batch, aux, None)))
      2.0
    """
    return mean(lambda outputs, y: _error(outputs, y) ** 2, weighted=weighted, labels=labels)


def mean_absolute_error(*, weighted: bool = True, labels: Part | None = None) -> Metric:
    """Returns the metric of the mean of ``|outputs - y|`` over all elements.

    Args:
      weighted: True weights the examples as the loss did, as in `mean`.
      labels: The part of a batch that has the labels, as in `mean`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain import Aux
      >>> metric = mean_absolute_error()
      >>> batch = None, jnp.array([[1.0], [3.0]])
      >>> aux = Aux(outputs=jnp.ones((2, 1)))
      >>> print(metric.compute(metric.update(metric.init(), batch, aux, None)))
      1.0
    """
    return mean(lambda outputs, y: jnp.abs(_error(outputs, y)), weighted=weighted, labels=labels)


def _require_scores(outputs: Any, name: str) -> None:
    """Raises ValueError unless there are scores of at least two classes."""
    # With one score per example, argmax is always 0, so that every label 0 would be correct.
    has_classes = jnp.ndim(outputs) >= 2 and outputs.shape[-1] >= 2
    advice = (
        "For one score per example use functrain.metrics.binary_accuracy(threshold=0.5), or "
        "threshold=0.0 for logits."
    )
    require(has_classes, name, "scores [B, ..., C] of at least two classes", outputs, advice)


def _to_classes(outputs: jax.Array, y: jax.Array) -> jax.Array:
    """Returns labels as classes `i32[B, ...]`, from classes or from one-hot labels."""
    require_labels(y)
    y = jnp.asarray(y)
    # The outputs have as many axes as one-hot labels, and one more than classes `[B, ...]`. Classes
    # `[B, ..., 1]` have a last axis of length one.
    if y.ndim == outputs.ndim and y.shape[-1] == outputs.shape[-1] > 1:
        return jnp.argmax(y, axis=-1)
    return _reshape_labels(y, outputs[..., 0]).astype(jnp.int32)


def _error(outputs: jax.Array, y: jax.Array) -> jax.Array:
    return outputs.astype(jnp.float32) - _reshape_labels(y, outputs).astype(jnp.float32)


def _reshape_labels(y: jax.Array, outputs: jax.Array) -> jax.Array:
    """Returns labels in the shape of outputs, from which they may differ by axes of length one.

    Raises:
      ValueError: The shapes differ otherwise, or there are no labels.
    """
    require_labels(y)
    y = jnp.asarray(y)
    # Without this check [B] and [B, 1] would be broadcast to [B, B], and the elements of labels
    # [B, C, H, W] would be compared with others of outputs [B, H, W, C].
    without_ones, expected_axes = ([n for n in x.shape if n != 1] for x in (y, outputs))
    is_compatible = without_ones == expected_axes and y.shape[:1] == outputs.shape[:1]
    require(is_compatible, "labels", f"the shape of outputs {outputs.shape}", y.shape)
    return y.reshape(outputs.shape)
