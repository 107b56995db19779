"""Where "to the bit" ends: a mean that the loop computes while it adds it to a metric."""

import keras
import numpy as np
import pytest

import bridge


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_weights_are_keras_fits_to_the_bit_and_the_loss_within_its_last_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=(320, n)).astype(np.float32) for n in (8, 16))

    def fitted(fit, **options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16)])
        model.compile("sgd", "mse")
        history = fit(model, x, y, epochs=2, shuffle=False, verbose=0, **options)
        return history.history["loss"], model.get_weights()

    loss, weights = fitted(bridge.fit, rewrites="exact")
    keras_loss, keras_weights = fitted(keras.Model.fit)
    for got, want in zip(weights, keras_weights, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_max_ulp(np.float32(loss), np.float32(keras_loss), 4)
