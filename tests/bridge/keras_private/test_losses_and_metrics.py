"""What Keras's private names for losses and metrics mean (checked with Keras 3.15.1)."""

from bridge import keras_private  # isort: skip  # before keras: it chooses the backend

import keras
import numpy as np


def test_get_loss_is_what_compile_makes():
    y, outputs = np.zeros(3), np.ones((3, 4))
    loss = keras_private.losses.get_loss("crossentropy", y, outputs)
    assert isinstance(loss, keras.Loss)
    assert loss.reduction == "sum_over_batch_size"


def test_losses_times_weights_add_up_to_the_loss():
    y, outputs, weight = np.zeros((4, 1)), np.arange(4.0)[:, None], np.array([1.0, 2.0, 3.0, 0.0])
    loss = keras.losses.MeanSquaredError()
    values, factor, valid = keras_private.losses.losses_and_weight(loss, y, outputs, weight)
    assert valid is None  # nothing is masked
    np.testing.assert_array_equal(values * factor, [0.0, 2.0, 12.0, 0.0])
    assert loss(y, outputs, sample_weight=weight) == np.mean(values * factor)


def test_get_metric_is_what_compile_makes_and_looks_at_shapes_only():
    y, outputs = keras.KerasTensor((3,)), keras.KerasTensor((3, 4))
    metric = keras_private.metrics.get_metric("accuracy", y, outputs)
    assert type(metric) is keras.metrics.SparseCategoricalAccuracy
