"""from_keras equals Keras; create_state and to_keras leave the Keras model alive and whole."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

import bridge
import functrain
from bridge.model import _variables
from tests.bridge.pure import SGD, assert_close, assert_equal, call, snapshot, specs, start


@pytest.mark.parametrize("training", [False, True])
def test_apply_equals_calling_the_model_bit_for_bit(build, training):
    model, x = build()
    apply, params, model_state = start(model)
    got = apply(params, model_state, x, training=training)
    assert_equal(got.outputs, call(model, x, training))
    assert_equal(got.losses, tuple(jnp.float32(loss) for loss in model.losses))
    assert_equal(got.model_state, _variables.values(_variables.layout(model))[1])


def test_apply_under_jit_equals_calling_the_model_and_leaves_it_as_it_was(build):
    model, x = build()
    before = snapshot(model)
    apply, params, model_state = start(model)
    got = jax.jit(lambda *args: apply(*args, training=True))(params, model_state, x)
    assert_equal(before, snapshot(model))
    # So that it can be the carry of a scan.
    assert specs(got.model_state) == specs(model_state)
    assert_close(got.outputs, call(model, x, True), model)
    assert_close(got.losses, tuple(jnp.float32(loss) for loss in model.losses), model)
    assert_close(got.model_state, _variables.values(_variables.layout(model))[1], model)


def test_training_is_passed_only_where_call_takes_it():
    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.drop = layers.Dropout(0.5)

        def call(self, x):
            return self.drop(x)

    model = Plain()
    x = np.ones((4, 3), np.float32)
    model(x)
    apply, params, model_state = start(model)
    assert_equal(apply(params, model_state, x, training=True).outputs, jnp.asarray(x))


# State


def test_donating_a_state_leaves_the_keras_model_alive(builders):
    model, x = builders["metric_and_loss_in_call"]()
    before = snapshot(model)
    donate = jax.jit(lambda s: jax.tree.map(lambda v: v + 1, s), donate_argnums=0)
    donate(bridge.create_state(model, SGD))
    assert_equal(before, snapshot(model))
    state = bridge.create_state(model, SGD)
    bridge.to_keras(state, model)
    donate(state)
    assert_equal(before, snapshot(model))
    model(x)


def test_init_returns_present_values_in_new_buffers(builders):
    model, _ = builders["batch_norm"]()
    pure = bridge.from_keras(model)
    kernel = model.layers[0].kernel
    kernel.assign(kernel + 1)
    params, _ = pure.init(jax.random.key(0), None)
    np.testing.assert_array_equal(params["conv2d"]["kernel"], kernel)
    params["conv2d"]["kernel"].delete()
    np.asarray(kernel)


# Randomness


def test_keras_counters_move_on_without_a_key(builders):
    model, x = builders["dropout"]()
    apply, params, first = start(model)
    a = apply(params, first, x, training=True)
    b = apply(params, a.model_state, x, training=True)
    assert a.model_state["dropout"]["seed_generator"].tolist() == [1, 1]
    assert b.model_state["dropout"]["seed_generator"].tolist() == [1, 2]
    assert not np.array_equal(a.outputs, b.outputs)


def test_a_key_decides_every_mask_and_counters_come_back_untouched(builders):
    model, x = builders["dropout"]()
    apply, params, model_state = start(model)
    other = jax.tree.map(lambda s: s + 7, model_state)  # other counters, which must not matter

    def masked(key, state):
        return apply(params, state, x, rng=jax.random.key(key), training=True)

    assert_equal(masked(0, model_state).outputs, masked(0, other).outputs)
    assert not np.array_equal(masked(0, other).outputs, masked(1, other).outputs)
    assert_equal(masked(0, model_state).model_state, model_state)
    assert_equal(masked(0, other).model_state, other)


def test_every_seed_generator_draws_differently_from_one_key():
    drops = [layers.Dropout(0.5, seed=1), layers.Dropout(0.5, seed=1)]
    x = keras.Input((64,))
    model = keras.Model(x, [drop(x) for drop in drops])
    apply, params, model_state = start(model)
    batch = np.ones((1, 64), np.float32)
    a, b = apply(params, model_state, batch, training=True).outputs
    assert_equal(a, b)
    a, b = apply(params, model_state, batch, training=True, rng=jax.random.key(0)).outputs
    assert not np.array_equal(a, b)


def test_statistics_move_on_under_a_key(builders):
    model, x = builders["batch_norm"]()
    apply, params, model_state = start(model)
    with_key = apply(params, model_state, x, rng=jax.random.key(0), training=True)
    assert_equal(with_key, apply(params, model_state, x, training=True))


# Transformations


def test_apply_can_be_mapped_over_params_and_keys(builders):
    model, x = builders["dropout"]()
    apply, params, model_state = start(model)

    def one(params, key):
        return apply(params, model_state, x, rng=key, training=True).outputs

    two = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    keys = jax.random.split(jax.random.key(0), 2)
    mapped = jax.vmap(one)(two, keys)
    for i, key in enumerate(keys):
        member = jax.tree.map(lambda p, i=i: p[i], two)
        assert_close(mapped[i], one(member, key))


def test_gradients_pass_through_checkpoint(builders):
    model, x = builders["dropout"]()
    apply, params, model_state = start(model)

    def loss(params, apply):
        return jnp.sum(apply(params, model_state, x).outputs ** 2)

    def train(*args):
        return apply(*args, training=True)

    plain = jax.grad(loss)(params, train)
    assert_close(jax.grad(loss)(params, jax.checkpoint(train)), plain)


@pytest.mark.smoke
@pytest.mark.parametrize("rng", [None, 0])
def test_a_keras_model_trains_to_the_same_bits_however_many_steps_are_fused(builders, rng):
    model, x = builders["dropout"]()
    batch = (x, np.ones((5, 8), np.float32))
    tx = optax.adam(1e-2)
    loss = functrain.supervised(
        bridge.from_keras(model), lambda outputs, y: jnp.mean((outputs - y) ** 2, axis=-1)
    )

    def train(k):
        key = None if rng is None else jax.random.key(rng)
        state = bridge.create_state(model, tx, rng=key)
        fused = functrain.fuse(functrain.train_step(loss, tx), k)
        for _ in range(4 // k):
            state, _ = fused(state, jax.tree.map(lambda a: np.stack([a] * k), batch))
        return state.replace(rng=None)

    assert_equal(train(4), train(1))
