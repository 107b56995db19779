"""bridge.loss in training: masks, weights, micro-batches and several outputs equal Keras's."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import functrain as ft

B, T, C = 6, 5, 4


def tokens_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    x = keras.Input((T,), dtype="int32")
    h = layers.Embedding(7, 3, mask_zero=True)(x)
    return keras.Model(x, layers.TimeDistributed(layers.Dense(C))(h))


@pytest.mark.parametrize(
    ("reduction", "ignored", "weighted"),
    [
        ("sum_over_batch_size", None, True),
        ("sum_over_batch_size", 0, False),
        ("mean_with_sample_weight", None, False),
        ("mean_with_sample_weight", 0, True),
        (None, None, True),
    ],
)
def test_micro_batches_have_the_loss_and_the_gradient_of_keras_large_batch(
    reduction: Any, ignored: int | None, weighted: bool
) -> None:
    n = 7  # of 3, 3 and 1
    rng = np.random.default_rng(4)
    x, y = rng.integers(1, 7, (n, T)), rng.integers(0, C, (n, T))
    for i, length in enumerate(rng.integers(1, T, n)):
        x[i, length:] = 0  # as many in no two micro-batches
    weight = rng.uniform(0, 2, (n, T)).astype(np.float32) if weighted else None
    net = tokens_model()
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignored, reduction=reduction
    )

    def of_keras(trainable: Any) -> Any:
        outputs, _ = net.stateless_call(trainable, net.non_trainable_variables, x)
        return jnp.mean(loss(y, outputs, sample_weight=weight))

    values = [v.value for v in net.trainable_variables]
    expected, theirs = jax.jit(jax.value_and_grad(of_keras))(values)

    model = bridge.from_keras(net)
    params, model_state = model.init(jax.random.key(0), x)
    loss_fn = ft.micro_batches(ft.supervised(model, bridge.loss(loss)), 3)
    batch = (x, y) if weight is None else (x, y, weight)
    value = jax.jit(
        jax.value_and_grad(
            lambda p: loss_fn(p, model_state, batch, rng=None, training=True), has_aux=True
        )
    )
    (mine, _), grads = value(params)
    np.testing.assert_allclose(mine, expected, rtol=1e-6)
    found = sorted(jax.tree.leaves(grads), key=np.size)
    for a, b in zip(found, sorted(theirs, key=np.size), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_micro_batches_refuse_what_is_no_mean() -> None:
    model = bridge.from_keras(two_outputs(dict))
    x = np.ones((4, 3), np.float32)
    y = {"a": np.ones((4, C)), "b": np.ones((4, 1))}
    params, model_state = model.init(jax.random.key(0), x)

    def value(loss: Any) -> Any:
        loss_fn = ft.micro_batches(ft.supervised(model, loss), 2)
        return loss_fn(params, model_state, (x, y), rng=None, training=True)[0]

    large = model.apply(params, model_state, x).outputs
    np.testing.assert_allclose(value(bridge.loss("mse")), bridge.loss("mse")(large, y), rtol=1e-6)
    with pytest.raises(ValueError, match="micro_batches: expected a loss that is one mean"):
        value(bridge.loss(keras.losses.MeanSquaredError(reduction="sum")))


def two_outputs(kind: type) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = keras.Input((3,))
    outputs = {"a": layers.Dense(C, name="a")(x), "b": layers.Dense(1, name="b")(x)}
    return keras.Model(x, outputs if kind is dict else list(outputs.values()))


@pytest.mark.parametrize("kind", [dict, list])
def test_several_outputs_equal_compile(kind: type) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(B, 3)).astype(np.float32)
    each = {
        "a": (keras.losses.MeanSquaredError(), 0.3, rng.normal(size=(B, C))),
        "b": ("mae", 2.0, rng.normal(size=(B, 1))),
    }
    weights = {"a": np.linspace(0, 1, B), "b": np.linspace(1, 2, B)}

    def shaped(values: dict[str, Any]) -> Any:
        return values if kind is dict else list(values.values())

    losses, factors, y = (shaped({k: v[i] for k, v in each.items()}) for i in range(3))
    model = two_outputs(kind)
    model.compile("sgd", losses, loss_weights=factors)
    for weight in (None, shaped(weights)):
        expected = model.evaluate(x, y, sample_weight=weight, verbose=0)
        mine = bridge.loss(losses, loss_weights=factors)(model(x), y, sample_weight=weight)
        np.testing.assert_allclose(
            mine, expected if np.isscalar(expected) else expected[0], rtol=1e-6
        )
