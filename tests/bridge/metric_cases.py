"""Outputs and labels for losses and metrics; every metric of Keras, with the kind it is for."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import metrics
from keras.src.backend.common.masking import set_keras_mask

del bridge

C, SIZES = 4, (6, 6, 3)
Batch = tuple[np.ndarray, np.ndarray]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x)
    return e / e.sum(-1, keepdims=True)


def data(kind: str, *batch: int, seed: int = 0) -> Batch:
    """Outputs and labels of the kind that a loss or a metric is for."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*batch, C)).astype(np.float32)
    y = rng.normal(size=(*batch, C)).astype(np.float32)
    classes = rng.integers(0, C, batch).astype(np.int32)
    transcripts = rng.integers(0, C, (*batch[:1], 3))
    return {
        "numbers": (x, y),
        "positive": (np.exp(x), np.exp(y)),
        "distributions": (softmax(x), softmax(y)),
        "signs": (x, np.sign(y)),
        "bits": (softmax(x), (y > 0).astype(np.float32)),
        "chances": (softmax(x)[..., 0], (y[..., 0] > 0).astype(np.float32)),
        "one_hot": (softmax(x), np.eye(C, dtype=np.float32)[classes]),
        "classes": (softmax(x), classes),
        "guesses": (rng.integers(0, C, batch).astype(np.int32), classes),
        "embeddings": (x / np.linalg.norm(x, axis=-1, keepdims=True), classes),
        "transcripts": (rng.normal(size=(*batch[:1], 8, C)).astype(np.float32), transcripts),
    }[kind]


def masked(outputs: Any, mask: Any) -> jax.Array:
    """Outputs with a mask of Keras's, if there is one."""
    outputs = jnp.asarray(outputs)
    if mask is not None:
        set_keras_mask(outputs, jnp.asarray(mask))
    return outputs


Make = Callable[[], keras.Metric]
CASES: dict[str, tuple[str, Make]] = {
    "AUC": ("chances", metrics.AUC),
    "Accuracy": ("guesses", metrics.Accuracy),
    "BinaryAccuracy": ("bits", metrics.BinaryAccuracy),
    "BinaryCrossentropy": ("bits", metrics.BinaryCrossentropy),
    "BinaryIoU": ("chances", metrics.BinaryIoU),
    "CategoricalAccuracy": ("one_hot", metrics.CategoricalAccuracy),
    "CategoricalCrossentropy": ("one_hot", metrics.CategoricalCrossentropy),
    "CategoricalHinge": ("one_hot", metrics.CategoricalHinge),
    "ConcordanceCorrelation": ("numbers", metrics.ConcordanceCorrelation),
    "CosineSimilarity": ("numbers", metrics.CosineSimilarity),
    "F1Score": ("bits", lambda: metrics.F1Score(average="macro")),
    "FBetaScore": ("bits", lambda: metrics.FBetaScore("weighted", beta=2.0, threshold=0.3)),
    "FalseNegatives": ("bits", metrics.FalseNegatives),
    "FalsePositives": ("bits", lambda: metrics.FalsePositives([0.2, 0.5])),
    "Hinge": ("signs", metrics.Hinge),
    "IoU": ("guesses", lambda: metrics.IoU(C, [0, 2])),
    "KLDivergence": ("distributions", metrics.KLDivergence),
    "LogCoshError": ("numbers", metrics.LogCoshError),
    "Mean": ("numbers", metrics.Mean),
    "MeanAbsoluteError": ("numbers", metrics.MeanAbsoluteError),
    "MeanAbsolutePercentageError": ("positive", metrics.MeanAbsolutePercentageError),
    "MeanIoU": ("guesses", lambda: metrics.MeanIoU(C)),
    "MeanMetricWrapper": (
        "numbers",
        lambda: metrics.MeanMetricWrapper(keras.losses.huber, delta=0.5),
    ),
    "MeanSquaredError": ("numbers", metrics.MeanSquaredError),
    "MeanSquaredLogarithmicError": ("positive", metrics.MeanSquaredLogarithmicError),
    "OneHotIoU": ("one_hot", lambda: metrics.OneHotIoU(C, [1, 2])),
    "OneHotMeanIoU": ("one_hot", lambda: metrics.OneHotMeanIoU(C)),
    "PearsonCorrelation": ("numbers", metrics.PearsonCorrelation),
    "Poisson": ("positive", metrics.Poisson),
    "Precision": ("bits", lambda: metrics.Precision(top_k=2)),
    "PrecisionAtRecall": ("chances", lambda: metrics.PrecisionAtRecall(0.5)),
    "R2Score": ("numbers", metrics.R2Score),
    "Recall": ("bits", lambda: metrics.Recall(class_id=1)),
    "RecallAtPrecision": ("chances", lambda: metrics.RecallAtPrecision(0.5)),
    "RootMeanSquaredError": ("numbers", metrics.RootMeanSquaredError),
    "SensitivityAtSpecificity": ("chances", lambda: metrics.SensitivityAtSpecificity(0.5)),
    "SparseCategoricalAccuracy": ("classes", metrics.SparseCategoricalAccuracy),
    "SparseCategoricalCrossentropy": ("classes", metrics.SparseCategoricalCrossentropy),
    "SparseTopKCategoricalAccuracy": (
        "classes",
        lambda: metrics.SparseTopKCategoricalAccuracy(2),
    ),
    "SpecificityAtSensitivity": ("chances", lambda: metrics.SpecificityAtSensitivity(0.5)),
    "SquaredHinge": ("signs", metrics.SquaredHinge),
    "Sum": ("numbers", metrics.Sum),
    "TopKCategoricalAccuracy": ("one_hot", lambda: metrics.TopKCategoricalAccuracy(2)),
    "TrueNegatives": ("bits", metrics.TrueNegatives),
    "TruePositives": ("bits", metrics.TruePositives),
}
MORE: dict[str, tuple[str, Make]] = {
    "AUC of labels": ("bits", lambda: metrics.AUC(multi_label=True)),
    "AUC of logits": ("bits", lambda: metrics.AUC(curve="PR", from_logits=True)),
    "F1Score of each class": ("bits", metrics.F1Score),
    "R2Score of each": ("numbers", lambda: metrics.R2Score(class_aggregation=None)),
    "R2Score adjusted": ("numbers", lambda: metrics.R2Score(num_regressors=2)),
    "mean in bfloat16": ("numbers", lambda: metrics.MeanSquaredError(dtype="bfloat16")),
    "IoU of scores": ("classes", lambda: metrics.MeanIoU(C, sparse_y_pred=False)),
}
