"""from_keras equals Keras; create_state and to_keras leave the Keras model alive and whole."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras import layers

import bridge
import functrain
from bridge import _variables
from functrain import Model, TrainState

SGD = optax.sgd(0.1)


def start(model):
    """Returns (apply, params, model_state)."""
    pure = bridge.from_keras(model)
    return pure.apply, *pure.init(jax.random.key(0), None)


def call(model, x, training):
    """Calls a model as Keras's own trainer does."""
    if "training" in model.call_signature_parameters:
        return model(x, training=training)
    return model(x)


def specs(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), jax.eval_shape(lambda: tree))


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), a, b)


def assert_close(a, b, model=None):
    # What was computed in bfloat16 has its precision, even where it ends in float32, as losses do.
    layers = [model, *getattr(model, "layers", ())] if model is not None else ()
    low = any(layer.compute_dtype == "bfloat16" for layer in layers)
    tolerance = 2e-2 if low else 1e-5

    def close(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), tolerance, tolerance
        )

    jax.tree.map(close, a, b)


def snapshot(model):
    return [np.asarray(v) for v in model.variables]


# Equal to Keras


@pytest.mark.parametrize("training", [False, True])
def test_apply_equals_calling_the_model_bit_for_bit(build, training):
    model, x = build()
    apply, params, model_state = start(model)
    got = apply(params, model_state, x, training=training)
    assert_equal(got.outputs, call(model, x, training))
    assert_equal(got.losses, tuple(jnp.float32(loss) for loss in model.losses))
    assert_equal(got.model_state, _variables.values(_variables.layout(model))[1])


@pytest.mark.parametrize("training", [False, True])
def test_apply_under_jit_equals_calling_the_model(build, training):
    model, x = build()
    apply, params, model_state = start(model)
    got = jax.jit(apply, static_argnames="training")(params, model_state, x, training=training)
    assert_close(got.outputs, call(model, x, training), model)
    assert_close(got.losses, tuple(jnp.float32(loss) for loss in model.losses), model)
    assert_close(got.model_state, _variables.values(_variables.layout(model))[1], model)


@pytest.mark.parametrize(
    "name", ["sequential", "functional", "batch_norm", "dropout", "nested", "attention"]
)
def test_apply_under_jit_equals_stateless_call_bit_for_bit(builders, name):
    model, x = builders[name]()
    apply, params, model_state = start(model)
    got = jax.jit(lambda *a: apply(*a, training=True))(params, model_state, x)
    outputs, others = jax.jit(lambda *a: model.stateless_call(*a, training=True))(
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        x,
    )
    assert_equal(got.outputs, outputs)
    where = _variables.layout(model)
    after = {id(v): x for v, x in zip(model.non_trainable_variables, others, strict=True)}
    expected = {path: after[id(v)] for path, v in where.model_state.items()}
    assert_equal(got.model_state, _variables.nest(expected))


def test_gradient_steps_equal_fit(builders):
    (ours, x), (theirs, _) = builders["batch_norm"](), builders["batch_norm"]()
    bridge.to_keras(bridge.create_state(ours, SGD), theirs)
    y = np.ones((len(x), 2), np.float32)
    theirs.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    theirs.fit(x, y, batch_size=len(x), epochs=3, shuffle=False, verbose=0)

    pure = bridge.from_keras(ours)

    @jax.jit
    def step(state):
        def loss(params):
            out = pure.apply(params, state.model_state, x, training=True)
            return jnp.mean((out.outputs - y) ** 2), out.model_state

        grads, model_state = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads, SGD).replace(model_state=model_state)

    state = bridge.create_state(ours, SGD)
    for _ in range(3):
        state = step(state)
    bridge.to_keras(state, ours)
    assert_close(snapshot(ours), snapshot(theirs))


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


def test_losses_are_f32_scalars_under_mixed_precision(builders):
    model, x = builders["mixed_bfloat16"]()
    apply, params, model_state = start(model)
    losses = apply(params, model_state, x).losses
    assert [(loss.shape, loss.dtype) for loss in losses] == [((), jnp.float32)] * 2


def test_a_masked_loss_in_the_same_trace_equals_keras(builders):
    model, x = builders["masked_lstm"]()
    y = np.random.default_rng(1).normal(size=(5, 6, 2)).astype(np.float32)
    model.compile("sgd", "mse")
    apply, params, model_state = start(model)

    @jax.jit
    def loss(params, x, y):
        return keras.losses.MeanSquaredError()(y, apply(params, model_state, x).outputs)

    masked = loss(params, x, y)
    np.testing.assert_allclose(masked, model.test_on_batch(x, y), rtol=1e-6)
    assert abs(masked - np.mean((np.asarray(model(x)) - y) ** 2)) > 1e-3


# State


def test_model_state_fits_a_scan(build):
    model, x = build()
    apply, params, model_state = start(model)

    def step(carry, _):
        return apply(params, carry, x, training=True).model_state, None

    after, _ = jax.lax.scan(step, model_state, length=2)
    assert specs(after) == specs(model_state)
    assert specs(apply(params, model_state, x).model_state) == specs(model_state)


def test_apply_leaves_the_keras_model_as_it_was(build):
    model, x = build()
    before = snapshot(model)
    apply, params, model_state = start(model)
    jax.jit(lambda *a: apply(*a, training=True))(params, model_state, x)
    assert_equal(before, snapshot(model))


def test_donating_a_created_state_leaves_the_keras_model_alive(build):
    model, x = build()
    before = snapshot(model)
    state = bridge.create_state(model, SGD)
    jax.jit(lambda s: jax.tree.map(lambda v: v + 1, s), donate_argnums=0)(state)
    assert_equal(before, snapshot(model))
    model(x)


def test_donating_a_state_after_to_keras_leaves_the_keras_model_alive(build):
    model, _ = build()
    state = bridge.create_state(model, SGD)
    bridge.to_keras(state, model)
    before = snapshot(model)
    jax.jit(lambda s: jax.tree.map(lambda v: v + 1, s), donate_argnums=0)(state)
    assert_equal(before, snapshot(model))


def test_init_returns_present_values_in_new_buffers(builders):
    model, _ = builders["batch_norm"]()
    pure = bridge.from_keras(model)
    kernel = model.layers[0].kernel
    kernel.assign(kernel + 1)
    params, _ = pure.init(jax.random.key(0), None)
    np.testing.assert_array_equal(params["conv2d"]["kernel"], kernel)
    params["conv2d"]["kernel"].delete()
    np.asarray(kernel)


def test_create_state_is_a_train_state_of_the_models_variables(builders):
    model, _ = builders["batch_norm"]()
    state = bridge.create_state(model, SGD, rng=jax.random.key(3))
    assert isinstance(state, TrainState)
    assert isinstance(bridge.from_keras(model), Model)
    assert int(state.step) == 0
    assert state.rng == jax.random.key(3)
    assert set(state.model_state["batch_normalization"]) == {"moving_mean", "moving_variance"}


def test_to_keras_takes_anything_with_params_and_model_state(builders):
    model, _ = builders["batch_norm"]()
    state = bridge.create_state(model, SGD)
    params = jax.tree.map(lambda p: np.asarray(p) + 1, state.params)
    before = np.asarray(model.layers[0].kernel)
    same = bridge.to_keras(SimpleNamespace(params=params, model_state=state.model_state), model)
    assert same is model
    np.testing.assert_array_equal(model.layers[0].kernel, before + 1)


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


def test_keys_can_be_mapped_over(builders):
    model, x = builders["dropout"]()
    apply, params, model_state = start(model)

    def one(key):
        return apply(params, model_state, x, rng=key, training=True).outputs

    keys = jax.random.split(jax.random.key(0), 3)
    mapped = jax.vmap(one)(keys)
    for key, outputs in zip(keys, mapped, strict=True):
        assert_close(outputs, one(key))


def test_statistics_move_on_under_a_key(builders):
    model, x = builders["batch_norm"]()
    apply, params, model_state = start(model)
    with_key = apply(params, model_state, x, rng=jax.random.key(0), training=True)
    assert_equal(with_key, apply(params, model_state, x, training=True))


# Transformations


def test_apply_can_be_mapped_over_params(builders):
    model, x = builders["batch_norm"]()
    apply, params, model_state = start(model)
    two = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    mapped = jax.vmap(lambda p: apply(p, model_state, x, training=True))(two)
    for i in range(2):
        member = jax.tree.map(lambda p, i=i: p[i], two)
        alone = apply(member, model_state, x, training=True)
        assert_close(jax.tree.map(lambda o, i=i: o[i], mapped.outputs), alone.outputs)


def test_gradients_pass_through_checkpoint(builders):
    model, x = builders["dropout"]()
    apply, params, model_state = start(model)

    def loss(params, apply):
        return jnp.sum(apply(params, model_state, x).outputs ** 2)

    def train(*args):
        return apply(*args, training=True)

    plain = jax.grad(loss)(params, train)
    assert_close(jax.grad(loss)(params, jax.checkpoint(train)), plain)


def test_apply_runs_on_shapes_alone(build):
    model, x = build()
    apply, params, model_state = start(model)
    out = jax.eval_shape(apply, params, model_state, x)
    assert jax.tree.structure(out.model_state) == jax.tree.structure(model_state)


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


# Refusals


class Explodes(keras.Model):
    """Has a layer that is first met in training; fails there, or not."""

    def __init__(self, error=None):
        super().__init__()
        self.fc = layers.Dense(3)
        self.late = layers.Dense(3)
        self.error = error

    def build(self, input_shape):
        self.fc.build(input_shape)

    def call(self, x, training=None):
        x = self.fc(x)
        if training:
            x = self.late(x)
            if self.error is not None:
                raise self.error
        return x


def whole(model, x):
    """Two calls agree, and every variable has a value outside of any trace."""
    assert not any(isinstance(v.value, jax.core.Tracer) for v in model.variables)
    return np.array_equal(call(model, x, True), call(model, x, True))


@pytest.mark.parametrize("jit", [True, False])
def test_variables_made_during_apply_are_named_and_the_model_stays_whole(jit):
    model, x = Explodes(), np.ones((2, 3), np.float32)
    model(x)
    apply, params, model_state = start(model)

    def train(params):
        return apply(params, model_state, x, training=True)

    with pytest.raises(ValueError, match=r"(?s)late/kernel: float32\[3, 3\].*create_state"):
        (jax.jit(train) if jit else train)(params)
    assert whole(model, x)
    apply, params, model_state = start(model)
    assert_close(jax.jit(train)(params).outputs, model(x, training=True))


def test_an_exception_in_the_middle_of_a_trace_leaves_the_model_whole():
    model, x = Explodes(RuntimeError("stop")), np.ones((2, 3), np.float32)
    model(x)
    apply, params, model_state = start(model)
    with pytest.raises(RuntimeError, match="stop"):
        jax.jit(jax.grad(lambda p: apply(p, model_state, x, training=True).outputs.sum()))(params)
    model.error = None
    assert whole(model, x)
    apply, params, model_state = start(model)
    assert_close(apply(params, model_state, x, training=True).outputs, model(x, training=True))


def test_losses_left_behind_by_a_failed_fit_do_not_return(builders):
    model, x = builders["shared_layers"]()
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="incompatible shapes"):
        model.fit(x, np.ones((5, 9), np.float32), verbose=0)
    apply, params, model_state = start(model)
    losses = jax.jit(apply)(params, model_state, x).losses
    assert len(losses) == 3
    assert all(np.isfinite(losses))


def test_updates_of_untracked_variables_are_named():
    model = keras.Sequential([layers.Input(batch_shape=(2, 4, 3)), layers.LSTM(2, stateful=True)])
    apply, params, model_state = start(model)
    with pytest.raises(ValueError, match=r"(?s)lstm.*float32\[2, 2\].*stateful=False"):
        jax.jit(apply)(params, model_state, np.ones((2, 4, 3), np.float32))


def test_an_unbuilt_model_is_refused_with_the_remedy():
    for model in (keras.Sequential([layers.Dense(2)]), Explodes()):
        for use in (bridge.from_keras, lambda m: bridge.create_state(m, SGD)):
            with pytest.raises(ValueError, match=r"expected a built model.*model\(x\)"):
                use(model)


def test_a_model_that_only_says_it_is_built_is_refused():
    model = Explodes()
    model.built = True
    with pytest.raises(ValueError, match="expected a built model"):
        bridge.from_keras(model)


def test_what_is_no_keras_model_is_refused():
    for use in (bridge.from_keras, lambda m: bridge.create_state(m, SGD)):
        with pytest.raises(TypeError, match=r"expected a keras.Model or keras.Layer, got int"):
            use(3)


def test_arguments_of_to_keras_in_the_wrong_order_are_refused(builders):
    model, _ = builders["sequential"]()
    state = bridge.create_state(model, SGD)
    with pytest.raises(TypeError, match=r"\(state, model\), got Sequential and TrainState"):
        bridge.to_keras(model, state)
    with pytest.raises(TypeError, match=r"with \.params and \.model_state, got dict"):
        bridge.to_keras({}, model)


def test_a_layer_frozen_after_init_is_named_by_apply(builders):
    model, x = builders["batch_norm"]()
    apply, params, model_state = start(model)
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match=r"(?s)model_state/conv2d/kernel: missing.*frozen"):
        jax.jit(apply)(params, model_state, x)


def test_constraints_that_optax_will_not_apply_are_named():
    net = [keras.Input((3,)), layers.Dense(2, kernel_constraint="non_neg")]
    with pytest.warns(UserWarning, match="(?s)have constraints.*dense/kernel"):
        bridge.create_state(keras.Sequential(net), SGD)


def test_a_step_that_changes_keras_variables_is_refused_and_the_model_stays_whole():
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dropout(0.5)])
    before = snapshot(model)

    def step(state, batch):
        return state + jnp.sum(model(batch, training=True)), {}

    state = jnp.zeros(())
    with pytest.raises(ValueError, match=r"(?s)assigns Keras variables:.*moving_mean.*from_keras"):
        functrain.fuse(step, 2)(state, jnp.ones((2, 4, 3)))
    assert not state.is_deleted()
    for a, b in zip(before, snapshot(model), strict=True):
        np.testing.assert_array_equal(a, b)
