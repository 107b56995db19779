"""What Keras's private names for metrics mean (checked with Keras 3.15.1)."""

import bridge  # isort: skip  # before keras: it chooses the backend


import keras
import numpy as np

from bridge import keras_private

del bridge


def test_get_metric_is_what_compile_makes_and_looks_at_shapes_only():
    y, outputs = keras.KerasTensor((3,)), keras.KerasTensor((3, 4))
    metric = keras_private.metrics.get_metric("accuracy", y, outputs)
    assert type(metric) is keras.metrics.SparseCategoricalAccuracy


def test_running_means_are_told_from_other_metrics():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def plain(*metrics, kind=model):
        kind.compile("sgd", "mse", metrics=list(metrics))
        keras_private.trainer.build(
            kind, (np.ones((2, 2), np.float32), np.ones((2, 1), np.float32))
        )
        return keras_private.metrics.has_running_means_only(kind)

    class Resets(keras.metrics.MeanAbsoluteError):
        def reset_state(self):
            super().reset_state()

    class Own(keras.Sequential):
        def get_metrics_result(self):
            return super().get_metrics_result()

    assert plain()
    assert plain(
        "mae", keras.metrics.MeanSquaredError(), keras.metrics.MeanMetricWrapper(keras.ops.subtract)
    )
    assert not plain(keras.metrics.RootMeanSquaredError())
    assert not plain(keras.metrics.AUC())
    assert not plain(Resets())
    assert not plain(kind=Own([keras.Input((2,)), keras.layers.Dense(1)]))


def test_metrics_that_build_late_say_so():
    late = keras.metrics.R2Score()
    assert not keras_private.metrics.is_built_metric(late)
    late.update_state(np.zeros((2, 1)), np.ones((2, 1)))
    assert keras_private.metrics.is_built_metric(late)
    assert keras_private.metrics.is_built_metric(keras.metrics.Mean())
