"""Losses that return a dict of logs, for models with a state that changes in training."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import bridge
import functrain as ft

X, KEY, TX = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3), jax.random.key(0), optax.sgd(0.1)


class Norm(nn.Module):
    frozen: bool = False

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=self.frozen or not train)(nn.Dense(3)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


class NnxNorm(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.drop = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(x))


def of_keras(*layers):
    return bridge.from_keras(keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), *layers]))


def step(model, training=True, rng=KEY, wrap=lambda loss: loss, is_jitted=False):
    """Takes a step with a loss that returns a dict, and returns the warnings."""
    apply = jax.jit(model.apply, static_argnames="training") if is_jitted else model.apply

    def loss_fn(params, model_state, batch, *, rng, training):
        mode = {"rng": rng, "training": training and is_training}
        outputs = apply(params, model_state, batch, **mode).outputs
        return jnp.mean(outputs**2), {"largest": outputs.max()}

    is_training = training
    params, model_state = model.init(KEY, X)
    state = ft.TrainState.create(params=params, model_state=model_state, tx=TX, rng=rng)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        jax.jit(ft.train_step(wrap(loss_fn), TX))(state, X)
    return [str(warning.message) for warning in seen]


@pytest.mark.parametrize(
    ("model", "path", "options"),
    [
        (ft.from_linen(Norm()), "batch_stats/BatchNorm_0/mean", {}),
        (ft.from_linen(Norm()), "batch_stats/BatchNorm_0/mean", {"is_jitted": True}),
        (ft.freeze(ft.from_linen(Norm()), "Dense_0/**"), "model/batch_stats/", {}),
        (ft.from_linen(Norm()), "BatchNorm_0", {"wrap": lambda f: ft.micro_batches(f, 2)}),
        (ft.from_nnx(NnxNorm(nnx.Rngs(0))), "norm/mean", {}),
        (ft.from_nnx(nnx.Dropout(0.5, rngs=nnx.Rngs(0))), "rngs/count", {"rng": None}),
        (of_keras(keras.layers.BatchNormalization()), "moving_mean", {}),
        (of_keras(keras.layers.Dropout(0.5, seed=1)), "/seed_generator", {"rng": None}),
    ],
)
def test_a_dict_in_place_of_a_new_model_state_is_warned_of(model, path, options):
    messages = step(model, **options)
    assert messages
    for message in messages:
        assert path in message
        assert "functrain.Aux(output.model_state, logs=logs)" in message


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (ft.from_linen(nn.Dense(3)), {}),
        (ft.from_linen(Norm(frozen=True)), {}),
        (ft.from_linen(Norm()), {"training": False}),
        (ft.freeze(ft.from_linen(nn.Sequential([nn.Dense(3), nn.Dense(3)])), "layers_0/**"), {}),
        (ft.lora(ft.from_linen(nn.Dense(3)), "kernel", rank=2), {}),
        (ft.from_nnx(nnx.Dropout(0.5, rngs=nnx.Rngs(0))), {}),
        (of_keras(), {}),
        (of_keras(keras.layers.BatchNormalization(trainable=False)), {}),
    ],
)
def test_a_dict_beside_a_model_state_that_stays_is_not_warned_of(model, options):
    assert step(model, **options) == []


def test_the_old_model_state_may_be_returned_on_purpose():
    model = ft.from_linen(Norm())
    params, model_state = model.init(KEY, X)

    def loss_fn(params, model_state, batch, **mode):
        loss = model.apply(params, model_state, batch, **mode).outputs.mean()
        return loss, ft.Aux(model_state, logs={"a": loss})

    state = ft.TrainState.create(params=params, model_state=model_state, tx=TX, rng=KEY)
    new, _ = ft.train_step(loss_fn, TX)(state, X)
    np.testing.assert_array_equal(new.model_state["batch_stats"]["BatchNorm_0"]["mean"], 0)
