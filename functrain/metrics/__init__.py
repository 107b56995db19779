"""Common running metrics, for the argument `metrics` of a step.

`bridge.metric` converts Keras metrics.

Files:
  _metric: Metric, means, and collections of metrics
  _labels: metrics that compare outputs with labels
"""

from functrain.metrics._labels import accuracy as accuracy
from functrain.metrics._labels import binary_accuracy as binary_accuracy
from functrain.metrics._labels import mean_absolute_error as mean_absolute_error
from functrain.metrics._labels import mean_squared_error as mean_squared_error
from functrain.metrics._labels import top_k_accuracy as top_k_accuracy
from functrain.metrics._metric import Metered as Metered
from functrain.metrics._metric import Metric as Metric
from functrain.metrics._metric import collection as collection
from functrain.metrics._metric import mean as mean
from functrain.metrics._metric import mean_loss as mean_loss

__all__ = [
    "Metered",
    "Metric",
    "accuracy",
    "binary_accuracy",
    "collection",
    "mean",
    "mean_absolute_error",
    "mean_loss",
    "mean_squared_error",
    "top_k_accuracy",
]
