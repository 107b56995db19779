"""Open loops, eager and compiled, layer losses, and a GAN, held to those by hand."""

import bridge  # isort: skip  # before keras

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import functrain as ft
from tests.guides import by_hand
from tests.guides.by_hand import assert_fused, assert_same, batches, digits, mlp, values

BATCH = 64
TX = optax.sgd(1e-3)
LOSS = optax.softmax_cross_entropy_with_integer_labels


def keras_loss(y, y_pred):
    return LOSS(y_pred, y).mean()


@pytest.fixture(scope="module")
def split():
    """Pixels from 0 to 255, as these guides leave them; validation examples drawn at random."""
    x, y = digits(3_000)
    drawn = np.random.default_rng(0).permutation(len(x))
    held_out, rest = drawn[:1_000], drawn[1_000:]
    return (255 * x[rest], y[rest]), (255 * x[held_out], y[held_out])


def parts(model):
    loss_fn = ft.supervised(bridge.from_keras(model), LOSS)
    metrics = {"accuracy": ft.metrics.accuracy()}
    step = ft.train_step(loss_fn, TX, metrics=metrics)
    return bridge.create_state(model, TX), step, ft.eval_step(loss_fn, metrics=metrics)


def loop(model):
    return by_hand.Loop(model, keras_loss, TX, keras.metrics.SparseCategoricalAccuracy())


def test_c1_an_open_loop_logs_samples_seen_and_seconds(split) -> None:
    train, _ = split
    seen, epochs = [], []
    state, step, _ = parts(mlp())
    loader = ft.ArrayLoader(train, BATCH)
    for event in ft.run(state, step, loader, epochs=2, boundaries=[ft.every(steps=20)]):
        match event:
            case ft.events.ChunkEnd(step=n, logs=logs) if n % 20 == 0:
                seen.append((n * BATCH, np.asarray(logs["loss"])[-1]))
            case ft.events.EpochEnd(epoch=epoch):
                epochs.append(epoch)
    hand = loop(mlp())
    losses, _, middle = hand.epoch(hand.start(), batches(train, BATCH))
    more, _, _ = hand.epoch(middle, batches(train, BATCH))
    expected = [(n * BATCH, (losses + more)[n - 1]) for n in (20, 40, 60)]
    assert_fused(seen, expected)
    assert epochs == [0, 1]
    history = ft.fit(state, step, loader, epochs=2, verbose=0).history
    assert history.epochs["seconds"].shape == (2,)
    assert (history.epochs["seconds"] > 0).all()


def test_c2_accuracy_per_epoch_for_training_and_validation(split) -> None:
    train, held_out = split
    state, step, eval_step = parts(mlp())
    _, history = ft.fit(
        state, step, ft.ArrayLoader(train, BATCH), epochs=2, verbose=0,
        eval_data=ft.ArrayLoader(held_out, BATCH), eval_step=eval_step,
    )  # fmt: skip
    hand = loop(mlp())
    state = hand.start()
    for epoch in range(2):
        _, running, state = hand.epoch(hand.reset(state), batches(train, BATCH))
        measured = (*state[:2], values(hand.metric.variables))
        for batch in batches(held_out, BATCH):
            _, measured = hand.eval_step(measured, batch)
        assert history.epochs["accuracy"][epoch] == running[-1]
        assert history.epochs["val_accuracy"][epoch] == float(hand.result(measured))


def test_c3_an_exhausted_iterator_trains_nothing_there_and_is_refused_here(split) -> None:
    train, _ = split
    state, step, _ = parts(mlp())

    spent = iter(batches(train, BATCH))
    list(spent)
    hand = loop(mlp())
    before = hand.start()
    losses, _, after = hand.epoch(before, spent)  # as written: no error, and nothing trained
    assert losses == []
    assert float(hand.result(after)) == 0.0
    assert_same(after[0], before[0])

    with pytest.raises(ValueError, match="exhausted after one pass"):
        ft.fit(state, step, spent, verbose=0)
    with pytest.raises(ValueError, match="exhausted after one pass"):
        ft.fit(state, step, iter(batches(train, BATCH)), epochs=2, verbose=0)


class Activity(keras.layers.Layer):
    """Adds to the loss what `how` makes of its inputs."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def call(self, inputs):
        self.add_loss(self.how(inputs))
        return inputs


@pytest.mark.long
def test_c4_layer_losses_are_trained_on(split) -> None:
    (x, y), _ = split
    train = x / 255, y

    def calm():
        return mlp(Activity(lambda x: 0.1 * keras.ops.mean(x)))

    state, step, _ = parts(calm())
    _, history = ft.fit(state, step, ft.ArrayLoader(train, BATCH), verbose=0)
    hand = loop(calm())
    losses, _, _ = hand.epoch(hand.start(), batches(train, BATCH))
    assert_fused(history.steps["loss"], losses)
    first = keras_loss(y[:BATCH], calm()(train[0][:BATCH]))
    assert losses[0] > first + 1e-3


# C5: the DCGAN of the example, and the guide's way of writing its step.


@pytest.fixture(scope="module")
def dcgan():
    path = pathlib.Path(__file__).parents[2] / "examples" / "dcgan.py"
    spec = importlib.util.spec_from_file_location("dcgan_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def images():
    x, _ = digits(5 * 2)
    return np.round(255 * x).astype(np.uint8).reshape(5, 2, 28, 28, 1)


def gan_by_hand(nets, txs, key):
    """The guide's train_step: raw stateless calls, gradients and updates, one after the other."""
    d, g = nets["d"], nets["g"]

    def d_loss_of(params, images, labels):
        logits, _ = d.stateless_call(params, [], images, training=True)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    def g_loss_of(params, d_params, latents):
        generated, _ = g.stateless_call(params, [], latents, training=True)
        return d_loss_of(d_params, generated, jnp.zeros((len(latents), 1)))

    @jax.jit
    def train_step(state, images, number):
        (d_params, d_opt), (g_params, g_opt) = state
        images = images.astype(jnp.float32) / 255
        size = len(images)
        keys = jax.random.split(jax.random.fold_in(key, number), 3)
        latents = jax.random.normal(keys[0], (size, 128))
        generated, _ = g.stateless_call(g_params, [], latents, training=True)
        labels = jnp.concatenate([jnp.ones((size, 1)), jnp.zeros((size, 1))])
        labels += 0.05 * jax.random.uniform(keys[1], labels.shape)
        both = jnp.concatenate([generated, images])
        d_loss, grads = jax.value_and_grad(d_loss_of)(d_params, both, labels)
        updates, d_opt = txs["d"].update(grads, d_opt, d_params)
        d_params = optax.apply_updates(d_params, updates)
        latents = jax.random.normal(keys[2], (size, 128))
        g_loss, grads = jax.value_and_grad(g_loss_of)(g_params, d_params, latents)
        updates, g_opt = txs["g"].update(grads, g_opt, g_params)
        g_params = optax.apply_updates(g_params, updates)
        return ((d_params, d_opt), (g_params, g_opt)), d_loss, g_loss, generated

    return train_step


def test_c5_the_step_is_the_guides_and_leaves_the_discriminator_to_its_own(dcgan, images) -> None:
    nets, txs, states = dcgan.create()
    train_step = gan_by_hand(nets, txs, jax.random.key(0))
    state = tuple(
        (params, txs[n].init(params))
        for n in ("d", "g")
        for params in [values(nets[n].trainable_variables)]
    )
    step = jax.jit(dcgan.gan_step(nets, txs))
    for number, batch in enumerate(images[:3]):
        states, logs = step(states, batch)
        state, d_loss, g_loss, generated = train_step(state, batch, number)
        np.testing.assert_allclose(logs["d_loss"], d_loss, rtol=1e-5)
        np.testing.assert_allclose(logs["g_loss"], g_loss, rtol=1e-5)
        np.testing.assert_allclose(logs["image"], generated[0], atol=1e-5)
    for name, (params, _) in zip(("d", "g"), state, strict=True):
        trained = bridge.to_keras(states[name], nets[name]).trainable_variables
        for got, expected in zip(values(trained), params, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)


def test_c5_fused_steps_are_single_steps(dcgan, images) -> None:
    nets, txs, states = dcgan.create()
    step = dcgan.gan_step(nets, txs)
    single, losses = jax.tree.map(jnp.copy, states), []
    for batch in images:
        single, logs = ft.fuse(step, 1)(single, batch[None])
        losses.append(logs["d_loss"][0])
    fused, logs = ft.fuse(step, 5)(states, images)
    assert_same(logs["d_loss"], losses)
    assert_same(
        jax.tree.leaves(jax.tree.map(_bits, fused)), jax.tree.leaves(jax.tree.map(_bits, single))
    )


def _bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
