"""How often the outputs name the right class."""

import jax
import jax.numpy as jnp

from functrain.metrics._metric import Metric, mean
from functrain.metrics._shapes import like


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
        lambda outputs, y: (outputs > threshold) == (like(y, outputs) > 0), weighted=weighted
    )


def _classes(outputs: jax.Array, y: jax.Array) -> jax.Array:
    """Returns labels as classes `i[B, ...]`, from classes or from one-hot rows."""
    y = jnp.asarray(y)
    if y.ndim == outputs.ndim and y.shape[-1] == outputs.shape[-1] > 1:
        return jnp.argmax(y, axis=-1)
    return like(y, outputs[..., 0]).astype(jnp.int32)
