"""What Keras's private names for metrics mean (checked with Keras 3.15.1)."""

import bridge  # isort: skip  # before keras: it chooses the backend


import keras

from bridge import keras_private

del bridge


def test_get_metric_is_what_compile_makes_and_looks_at_shapes_only():
    y, outputs = keras.KerasTensor((3,)), keras.KerasTensor((3, 4))
    metric = keras_private.metrics.get_metric("accuracy", y, outputs)
    assert type(metric) is keras.metrics.SparseCategoricalAccuracy
