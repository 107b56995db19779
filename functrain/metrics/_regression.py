"""How far the outputs are from numbers."""

import jax
import jax.numpy as jnp

from functrain.metrics._metric import Metric, mean
from functrain.metrics._shapes import like


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


def _error(outputs: jax.Array, y: jax.Array) -> jax.Array:
    return outputs.astype(jnp.float32) - like(y, outputs).astype(jnp.float32)
