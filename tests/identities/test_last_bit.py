"""Where "to the bit" ends: means that the loop adds to a metric; depthwise convolutions."""

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


def test_blurred_images_give_weights_within_rounding_whatever_k() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(48, 16, 16, 3)).astype(np.float32)
    y = rng.normal(size=(48, 1)).astype(np.float32)

    def weights(fit, **options):
        keras.utils.set_random_seed(0)
        blur = keras.layers.RandomGaussianBlur(value_range=(0, 1), seed=1)  # a depthwise one
        layers = [keras.layers.Conv2D(4, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((16, 16, 3)), blur, *layers])
        model.compile("adam", "mse")
        fit(model, x, y, batch_size=8, shuffle=False, verbose=0, **options)
        return model.get_weights()

    by_twos = weights(bridge.fit, rewrites="exact", fuse=2)
    by_fives = weights(bridge.fit, rewrites="exact", fuse=5)
    for got, same, want in zip(by_twos, by_fives, weights(keras.Model.fit), strict=True):
        np.testing.assert_array_equal(got, same)
        assert np.max(np.abs(got - want)) <= 2e-7 * np.max(np.abs(want))
