"""The common running metrics, for `metrics={...}` of a step. Keras's come through the bridge.

Files:
  _metric: Metric, means, and many metrics as one
  _classification: how often the outputs name the right class
  _regression: how far the outputs are from numbers
  _shapes: labels in the shape of the outputs
"""

from functrain.metrics._classification import accuracy, binary_accuracy, top_k_accuracy
from functrain.metrics._metric import collection, mean, mean_loss
from functrain.metrics._regression import mean_absolute_error, mean_squared_error

__all__ = [
    "accuracy",
    "binary_accuracy",
    "collection",
    "mean",
    "mean_absolute_error",
    "mean_loss",
    "mean_squared_error",
    "top_k_accuracy",
]
