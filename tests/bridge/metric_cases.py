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
HUBER = keras.losses.huber
OF_KIND = {
    "bits": "BinaryAccuracy BinaryCrossentropy FalseNegatives TrueNegatives TruePositives",
    "chances": "AUC BinaryIoU",
    "classes": "SparseCategoricalAccuracy SparseCategoricalCrossentropy",
    "distributions": "KLDivergence",
    "guesses": "Accuracy",
    "numbers": "ConcordanceCorrelation CosineSimilarity LogCoshError Mean MeanAbsoluteError "
    "MeanSquaredError PearsonCorrelation R2Score RootMeanSquaredError Sum",
    "one_hot": "CategoricalAccuracy CategoricalCrossentropy CategoricalHinge",
    "positive": "MeanAbsolutePercentageError MeanSquaredLogarithmicError Poisson",
    "signs": "Hinge SquaredHinge",
}
WITH_ARGUMENTS: dict[str, tuple[str, Make]] = {
    "F1Score": ("bits", lambda: metrics.F1Score(average="macro")),
    "FBetaScore": ("bits", lambda: metrics.FBetaScore("weighted", beta=2.0, threshold=0.3)),
    "FalsePositives": ("bits", lambda: metrics.FalsePositives([0.2, 0.5])),
    "IoU": ("guesses", lambda: metrics.IoU(C, [0, 2])),
    "MeanIoU": ("guesses", lambda: metrics.MeanIoU(C)),
    "MeanMetricWrapper": ("numbers", lambda: metrics.MeanMetricWrapper(HUBER, delta=0.5)),
    "OneHotIoU": ("one_hot", lambda: metrics.OneHotIoU(C, [1, 2])),
    "OneHotMeanIoU": ("one_hot", lambda: metrics.OneHotMeanIoU(C)),
    "Precision": ("bits", lambda: metrics.Precision(top_k=2)),
    "PrecisionAtRecall": ("chances", lambda: metrics.PrecisionAtRecall(0.5)),
    "Recall": ("bits", lambda: metrics.Recall(class_id=1)),
    "RecallAtPrecision": ("chances", lambda: metrics.RecallAtPrecision(0.5)),
    "SensitivityAtSpecificity": ("chances", lambda: metrics.SensitivityAtSpecificity(0.5)),
    "SparseTopKCategoricalAccuracy": ("classes", lambda: metrics.SparseTopKCategoricalAccuracy(2)),
    "SpecificityAtSensitivity": ("chances", lambda: metrics.SpecificityAtSensitivity(0.5)),
    "TopKCategoricalAccuracy": ("one_hot", lambda: metrics.TopKCategoricalAccuracy(2)),
}
CASES: dict[str, tuple[str, Make]] = WITH_ARGUMENTS | {
    name: (kind, getattr(metrics, name))
    for kind, names in OF_KIND.items()
    for name in names.split()
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
