"""What `compile` makes of a metric."""

from typing import Any

from keras.src.trainers import compile_utils


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
