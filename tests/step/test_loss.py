import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

from functrain import Model, ModelOutput, supervised

MODEL = Model(
    init=lambda key, x: ({}, {}),
    apply=lambda p, s, x, *, rng=None, training=False: ModelOutput(x, s),
)
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(8, 5)).astype(np.float32)
LABELS = RNG.integers(0, 5, 8)
WEIGHT = RNG.uniform(0, 2, 8).astype(np.float32)


def value(loss_fn, *batch):
    return loss_fn({}, {}, batch, rng=None, training=True)[0]


def test_the_mean_and_sample_weights_reduce_as_in_keras() -> None:
    loss_fn = supervised(MODEL, optax.softmax_cross_entropy_with_integer_labels)
    theirs = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    np.testing.assert_allclose(value(loss_fn, LOGITS, LABELS), theirs(LABELS, LOGITS), rtol=1e-6)
    expected = theirs(LABELS, LOGITS, sample_weight=WEIGHT)
    np.testing.assert_allclose(value(loss_fn, LOGITS, LABELS, WEIGHT), expected, rtol=1e-6)
    column = WEIGHT[:, None]
    np.testing.assert_allclose(value(loss_fn, LOGITS, LABELS, column), expected, rtol=1e-6)


def test_weighted_mean_divides_by_the_weights() -> None:
    loss_fn = supervised(MODEL, optax.squared_error, reduction="weighted_mean")
    target = np.zeros_like(LOGITS)
    expected = np.average(
        (LOGITS.astype(np.float64) ** 2).mean(1), weights=WEIGHT.astype(np.float64)
    )
    np.testing.assert_allclose(value(loss_fn, LOGITS, target, WEIGHT), expected, rtol=1e-6)


def test_weights_of_sequences_follow_the_leading_axes() -> None:
    loss_fn = supervised(MODEL, lambda outputs, y: (outputs - y) ** 2)
    x = RNG.normal(size=(4, 6)).astype(np.float32)
    per_step = RNG.uniform(size=(4, 6)).astype(np.float32)
    expected = (x.astype(np.float64) ** 2 * per_step).mean()
    np.testing.assert_allclose(value(loss_fn, x, np.zeros_like(x), per_step), expected, rtol=1e-6)


def test_losses_the_model_added_are_added_once() -> None:
    def apply(params, model_state, x, *, rng=None, training=False):
        return ModelOutput(x, model_state, (jnp.float32(0.5), jnp.float32(0.25)))

    loss_fn = supervised(Model(MODEL.init, apply), optax.squared_error)
    assert value(loss_fn, np.zeros((2, 1), np.float32), np.zeros((2, 1), np.float32)) == 0.75


def test_the_mean_is_taken_in_float32_for_low_precision_outputs(strict_promotion) -> None:
    loss_fn = supervised(MODEL, lambda outputs, y: outputs)
    outputs = jnp.full((1000,), 1.01, jnp.bfloat16)
    result = value(loss_fn, outputs, None)
    assert result.dtype == jnp.float32
    assert result == jnp.float32(outputs[0])


def test_a_scalar_loss_is_taken_as_it_is_but_not_weighted() -> None:
    loss_fn = supervised(MODEL, lambda outputs, y: jnp.mean(outputs))
    assert value(loss_fn, jnp.ones((4, 1)), None) == 1.0
    with pytest.raises(ValueError, match=r"sample_weight: expected a loss per example"):
        value(loss_fn, jnp.ones((4, 1)), None, jnp.ones(4))


@pytest.mark.parametrize("shape", [(7,), (8, 3), (8, 1, 1, 1)])
def test_weights_that_do_not_fit_are_refused(shape) -> None:
    loss_fn = supervised(MODEL, optax.softmax_cross_entropy_with_integer_labels)
    with pytest.raises(ValueError, match=r"sample_weight: expected the leading axes.*float32\[8\]"):
        value(loss_fn, LOGITS, LABELS, np.ones(shape, np.float32))


@pytest.mark.parametrize("batch", [{"x": LOGITS}, (LOGITS,), (LOGITS, LABELS, WEIGHT, WEIGHT)])
def test_a_batch_that_is_no_pair_or_triple_is_refused(batch) -> None:
    loss_fn = supervised(MODEL, optax.squared_error)
    with pytest.raises(ValueError, match=r"batch: expected \(x, y\) or \(x, y, sample_weight\)"):
        loss_fn({}, {}, batch, rng=None, training=True)


@pytest.mark.parametrize(("outputs", "y"), [((8, 1), (8,)), ((8,), (8, 1)), ((6, 6, 1), (6, 6))])
def test_labels_that_would_be_broadcast_are_refused(outputs, y) -> None:
    loss_fn = supervised(MODEL, optax.huber_loss)
    with pytest.raises(ValueError, match=r"expected a value per example.*got float32\["):
        value(loss_fn, jnp.ones(outputs), jnp.ones(y))


def test_a_batch_without_weight_has_no_loss() -> None:
    loss_fn = supervised(MODEL, optax.squared_error, reduction="weighted_mean")
    assert value(loss_fn, LOGITS, np.zeros_like(LOGITS), np.zeros(8, np.float32)) == 0.0


def test_a_keras_loss_or_model_is_refused_with_the_way_to_use_it() -> None:
    for loss in (keras.losses.BinaryCrossentropy(), keras.losses.categorical_crossentropy):
        with pytest.raises(TypeError, match=r"takes the labels first, got .*use bridge\.loss"):
            supervised(MODEL, loss)
    with pytest.raises(TypeError, match=r"got 'mse'.*bridge.loss\(loss\)"):
        supervised(MODEL, "mse")
    with pytest.raises(TypeError, match=r"expected a functrain\.Model, got Sequential.*from_keras"):
        supervised(keras.Sequential([keras.Input((2,))]), optax.squared_error)
