"""What `compile` makes of a metric, and which metrics are plain."""

from typing import Any

import keras
from keras.src.metrics import reduction_metrics
from keras.src.trainers import compile_utils
from keras.src.trainers.trainer import Trainer


def get_metric(identifier: Any, y: Any, outputs: Any) -> Any:
    """Returns the metric that `compile` makes of a name for such labels and outputs.

    Calls `compile_utils.get_metric`; checked with Keras 3.15.1. Without it "accuracy" means
    nothing.
    """
    return compile_utils.get_metric(identifier, y, outputs)


def is_built_metric(metric: Any) -> bool:
    """Whether a metric has all its variables.

    Reads `_built` of F1Score, FBetaScore, R2Score and AUC, which make some at their first batch;
    checked with Keras 3.15.1. Without it a state made before that batch is too short for it.
    """
    return bool(getattr(metric, "_built", True))


def only_running_means(model: keras.Model) -> bool:
    """Whether all metrics of a model are reset and read by Keras's own `Mean` or `Sum`.

    Compares with `reduction_metrics.Mean` and `Sum` and with `Trainer`, and looks into
    `CompileMetrics`; checked with Keras 3.15.1. Their results are a quotient, or a value as it
    is: the same bits in a program of its own, or in none. Without it every epoch resets and reads
    metrics one operation at a time.
    """
    owner = type(model)
    if any(
        getattr(owner, name) is not getattr(Trainer, name) or name in vars(model)
        for name in ("reset_metrics", "get_metrics_result")
    ):
        return False
    nested = [
        m.metrics if isinstance(m, compile_utils.CompileMetrics) else [m] for m in model.metrics
    ]
    kinds = (reduction_metrics.Mean, reduction_metrics.Sum)
    return all(
        any(type(m).result is k.result and type(m).reset_state is k.reset_state for k in kinds)
        for metrics in nested
        for m in metrics
    )
