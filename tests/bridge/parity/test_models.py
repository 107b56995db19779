"""Models of several inputs and outputs, and classes that override steps, losses and metrics."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.bridge import parity
from tests.bridge.parity import LABELS, WEIGHTS, Case, Subclassed, X, Y, dense

CASES = parity.Cases()


def two_heads(**compiled: Any) -> keras.Model:
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    x = layers.Dense(8, "relu")(layers.Concatenate()([a, b]))
    outputs = {"value": layers.Dense(4, name="value")(x), "kind": layers.Dense(4, name="kind")(x)}
    model = keras.Model({"a": a, "b": b}, outputs)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", {"value": "mse", "kind": crossentropy}, **compiled)
    return model


@CASES
def dict_targets() -> Case:
    model = two_heads(metrics={"value": ["mae"], "kind": ["accuracy"]})
    return model, {"x": {"a": X, "b": -X}, "y": {"value": Y, "kind": LABELS}}


@CASES
def loss_weights() -> Case:
    model = two_heads(
        loss_weights={"value": 0.3, "kind": 2.0},
        weighted_metrics={"value": ["mae"], "kind": ["accuracy"]},
    )
    targets = {"value": Y, "kind": LABELS}
    weights = {"value": WEIGHTS, "kind": WEIGHTS[::-1]}
    return model, {"x": {"a": X, "b": -X}, "y": targets, "sample_weight": weights}


@CASES
def lists_of_outputs() -> Case:
    a, b = keras.Input((8,)), keras.Input((8,))
    x = layers.Concatenate()([a, b])
    model = keras.Model([a, b], [layers.Dense(4)(x), layers.Dense(4)(x)])
    model.compile("sgd", ["mse", "mae"], metrics=[["mae"], ["mse"]])
    return model, {"x": [X, -X], "y": [Y, -Y], "validation_split": 0.25}


class OwnLoss(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.abs(y - y_pred)) + 0.01 * ops.mean(ops.square(y_pred))


@CASES
def own_compute_loss() -> Case:
    model = OwnLoss()
    model.compile("adam", metrics=["mae"])
    return model, {"x": X, "y": Y}


class OwnMetrics(Subclassed):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "norm": ops.mean(ops.square(y_pred))}


@CASES
def own_compute_metrics() -> Case:
    model = OwnMetrics()
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": X, "y": Y}


class OwnStep(Subclassed):
    """Its own train_step and metrics, as the guide writes them; its logs are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def loss_and_updates(self, trainable, rest, x, y):
        y_pred, rest = self.stateless_call(trainable, rest, x, training=True)
        return ops.mean(ops.square(y - y_pred)), rest

    def train_step(self, state, data):
        import jax

        trainable, rest, opt, metrics = state
        x, y = data
        grad = jax.value_and_grad(self.loss_and_updates, has_aux=True)
        (loss, rest), grads = grad(trainable, rest, x, y)
        trainable, opt = self.optimizer.stateless_apply(opt, grads, trainable)
        metrics = self.tracker.stateless_update_state(metrics, loss)
        logs = {"loss": self.tracker.stateless_result(metrics), "more": {"now": loss}}
        return logs, (trainable, rest, opt, metrics)


@CASES.every_run
def own_train_step_with_nested_logs() -> Case:
    model = OwnStep()
    model.compile("adam")
    return model, {"x": X, "y": Y}


class OwnTestStep(Subclassed):
    """Its own test_step, whose logs are not those of its metrics."""

    def test_step(self, state, data):
        trainable, rest, metrics = state
        x, y = data
        y_pred, rest = self.stateless_call(trainable, rest, x, training=False)
        return {"worst": ops.max(ops.abs(y - y_pred))}, (trainable, rest, metrics)


@CASES
def own_test_step() -> Case:
    model = OwnTestStep()
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": X, "y": Y, "validation_split": 0.25}


class Moments(keras.metrics.Metric):
    """A metric with a dict for a result, and a reset of its own: to one, not to zero."""

    def __init__(self) -> None:
        super().__init__(name="moments")
        self.first = self.add_weight(shape=(), initializer="ones", name="first")
        self.second = self.add_weight(shape=(), initializer="ones", name="second")

    def update_state(self, y, y_pred, sample_weight=None):
        self.first.assign_add(ops.mean(y - y_pred))
        self.second.assign_add(ops.mean(ops.square(y - y_pred)))

    def result(self):
        return {"first": self.first.value + 0.0, "spread": self.second - ops.square(self.first)}

    def reset_state(self):
        self.first.assign(1.0)
        self.second.assign(1.0)


@CASES
def metric_with_a_dict_and_a_reset_of_its_own() -> Case:
    return dense(compiled={"metrics": [Moments(), "mae"]}, validation_split=0.25, epochs=3)


@CASES
def jax_metrics_with_reset() -> Case:
    auc = [keras.metrics.AUC(num_thresholds=20), keras.metrics.Precision(), "binary_accuracy"]
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, "sigmoid")])
    model.compile("adam", "binary_crossentropy", metrics=auc)
    return model, {"x": X, "y": (Y > 0).astype(np.float32), "validation_split": 0.25}


@CASES.each
def test_fit_equals_keras_to_the_bit_whatever_is_fused(make: Any, fuse: Any) -> None:
    parity.assert_fits_as_keras(make, fuse)
