"""What `compile` makes of a metric, and which metrics are plain running means."""

from typing import Any

import keras
from keras.src.metrics import reduction_metrics
from keras.src.trainers import compile_utils

_RUNNING_MEANS = (reduction_metrics.Mean, reduction_metrics.Sum)


def get_metric(identifier: Any, y: Any, outputs: Any) -> Any:
    """Returns the metric that `compile` makes of a name for such labels and outputs.

    Calls `compile_utils.get_metric`; checked with Keras 3.15.1. Without it "accuracy" means
    nothing.
    """
    return compile_utils.get_metric(identifier, y, outputs)


def is_built_metric(metric: Any) -> bool:
    """Returns True if a metric has all its variables.

    Reads `_built` of F1Score, FBetaScore, R2Score and AUC, which make some at their first batch;
    checked with Keras 3.15.1. Without it a state made before that batch is too short for it.
    """
    return bool(getattr(metric, "_built", True))


def has_running_means_only(model: keras.Model) -> bool:
    """Returns True if Keras's own `Mean` or `Sum` resets and reads all metrics of a model.

    Compares with `reduction_metrics.Mean` and `Sum`, and looks into `CompileMetrics`; checked with
    Keras 3.15.1. Their results are a quotient or a plain value, which have the same bits in a
    separate program as in none. Without it every epoch resets and reads metrics one operation at
    a time.
    """
    # A user may override these methods in the class or in the object.
    for name in ("reset_metrics", "get_metrics_result"):
        if name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name):
            return False
    metrics: list[Any] = []
    for metric in model.metrics:
        is_list = isinstance(metric, compile_utils.CompileMetrics)
        metrics += metric.metrics if is_list else [metric]
    return all(map(_is_running_mean, metrics))


def _is_running_mean(metric: Any) -> bool:
    """Returns True if a metric's `result` and `reset_state` are those of `Mean` or of `Sum`."""
    methods = type(metric).result, type(metric).reset_state
    return any(methods == (cls.result, cls.reset_state) for cls in _RUNNING_MEANS)
