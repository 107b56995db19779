"""Sums that XLA orders differently in a loop are Keras's to the bit, but not depthwise ones."""

import keras
import numpy as np
import pytest

import bridge


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_mean_of_a_loss_is_keras_fits_to_the_bit(seed: int) -> None:
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
    assert loss == keras_loss


ONE_OUTPUT = {
    "sgd": {"optimizer": "sgd"},
    "mae": {"optimizer": "adam", "loss": "mae"},
    "weights": {"optimizer": "adam", "sample_weight": np.linspace(0, 1, 64)},
    "dropout": {"optimizer": "sgd", "last": [keras.layers.Dropout(0.5)]},
    "metrics": {"optimizer": "adam", "metrics": ["mae"]},
    "hidden": {"optimizer": "adam", "first": [keras.layers.Dense(16, "relu")], "loss": "mae"},
}


@pytest.mark.parametrize("features", [7, 16])
@pytest.mark.parametrize("case", ONE_OUTPUT)
def test_a_layer_with_one_output_is_keras_fits_to_the_bit(case: str, features: int) -> None:
    options = ONE_OUTPUT[case]
    x = np.random.default_rng(3).normal(size=(64, features)).astype(np.float32)

    def fitted(fit, **how):
        keras.utils.set_random_seed(7)
        first, last = (
            [layer.from_config(layer.get_config()) for layer in options.get(place, [])]
            for place in ("first", "last")
        )
        net = [keras.Input((features,)), *first, keras.layers.Dense(1), *last]
        model = keras.Sequential(net)
        model.compile(
            options["optimizer"], options.get("loss", "mse"), metrics=options.get("metrics")
        )
        how["sample_weight"] = options.get("sample_weight")
        history = fit(model, x, x.sum(1, keepdims=True), epochs=3, batch_size=16, verbose=0, **how)
        return history.history, [np.asarray(v) for v in model.variables + model.optimizer.variables]

    want, variables = fitted(keras.Model.fit)
    for fuse in (1, 3):
        got, new = fitted(bridge.fit, rewrites="exact", fuse=fuse)
        assert got == want
        for have, value in zip(new, variables, strict=True):
            np.testing.assert_array_equal(have, value)


class Positions(keras.layers.Layer):
    """Puts a token in front, and adds a row of a table to each position."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[-1]))
        self.table = keras.layers.Embedding(shape[1] + 1, shape[-1])
        self.positions = keras.ops.arange(shape[1] + 1)[None]

    def call(self, x):
        token = keras.ops.repeat(self.token, keras.ops.shape(x)[0], axis=0)
        return keras.ops.concatenate([token, x], axis=1) + self.table(self.positions)


def test_a_vision_transformer_is_keras_fits_to_the_bit() -> None:
    # Positions are constants. Moved in front of the loop, what is made of them changes the sums.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(44, 8, 8, 3)).astype(np.float32)
    y = np.arange(44, dtype=np.int32) % 2

    def fitted(fit, **options):
        keras.utils.set_random_seed(0)
        image = keras.Input((8, 8, 3))
        patches = keras.layers.Reshape((4, 8))(keras.layers.Conv2D(8, 4, 4)(image))
        tokens = Positions()(patches)
        normed = keras.layers.LayerNormalization()(tokens)
        tokens = tokens + keras.layers.MultiHeadAttention(2, 4)(normed, normed)
        hidden = keras.layers.Dense(16, "gelu")(keras.layers.LayerNormalization()(tokens))
        tokens = keras.layers.LayerNormalization()(tokens + keras.layers.Dense(8)(hidden))
        model = keras.Model(image, keras.layers.Dense(2)(keras.layers.Flatten()(tokens)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        fit(model, x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, **options)
        return [np.asarray(v) for v in model.variables + model.optimizer.variables]

    want = fitted(keras.Model.fit)
    for fuse in (1, 3):
        for got, value in zip(fitted(bridge.fit, rewrites="exact", fuse=fuse), want, strict=True):
            np.testing.assert_array_equal(got, value)


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
