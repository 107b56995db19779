"""A DCGAN's step: two networks, two optimizers, two `functrain.update`s."""

from typing import Any

import jax
import jax.numpy as jnp
import keras
import optax
from keras import layers

import bridge
import functrain as ft

LATENT = 128


def discriminator() -> keras.Model:
    """Images `[B, 28, 28, 1]` in, the logit of "generated" `[B, 1]` out."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(64, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(128, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ]
    )


def generator() -> keras.Model:
    """Latents `[B, 128]` in, images out."""
    up = {"strides": 2, "padding": "same"}
    return keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(7 * 7 * 128),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Reshape((7, 7, 128)),
            layers.Conv2DTranspose(128, 4, **up),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2DTranspose(128, 4, **up),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 7, padding="same", activation="sigmoid"),
        ]
    )


def make() -> tuple[dict[str, ft.TrainState], ft.Step[Any]]:
    """Returns the two states and the step over both."""
    keras.utils.set_random_seed(0)
    nets = {"d": discriminator(), "g": generator()}
    txs = {"d": optax.adam(3e-4, eps=1e-7), "g": optax.adam(4e-4, eps=1e-7)}
    key = jax.random.key(0)
    states = {n: bridge.create_state(net, txs[n], rng=key) for n, net in nets.items()}
    models = {n: bridge.from_keras(net) for n, net in nets.items()}
    return states, _step(models, txs)


def _step(
    models: dict[str, ft.Model], txs: dict[str, optax.GradientTransformation]
) -> ft.Step[Any]:
    def judge(params, model_state, images, labels, *, rng, training):
        logits, model_state, _ = models["d"].apply(params, model_state, images, training=training)
        loss = optax.sigmoid_binary_cross_entropy(logits, labels).mean()
        return loss, ft.Aux(model_state)

    def deceive(params, model_state, latents, d, *, rng, training):
        images, model_state, _ = models["g"].apply(params, model_state, latents, training=training)
        wanted = jnp.zeros((len(latents), 1))  # "real", which they are not
        loss, _ = judge(d.params, d.model_state, images, wanted, rng=None, training=training)
        return loss, ft.Aux(model_state)

    def step(states: dict[str, ft.TrainState], batch: Any) -> tuple[Any, Any]:
        real, _ = batch
        d, g = states["d"], states["g"]
        keys = jax.random.split(jax.random.fold_in(g.rng, g.step), 3)
        size = len(real)
        latents = jax.random.normal(keys[0], (size, LATENT))
        fake = models["g"].apply(g.params, g.model_state, latents, training=True).outputs
        labels = jnp.concatenate([jnp.ones((size, 1)), jnp.zeros((size, 1))])
        labels = labels + 0.05 * jax.random.uniform(keys[1], labels.shape)
        d, d_loss, _ = ft.update(d, judge, txs["d"], jnp.concatenate([fake, real]), labels)
        latents = jax.random.normal(keys[2], (size, LATENT))
        g, g_loss, _ = ft.update(g, deceive, txs["g"], latents, d)
        return {"d": d, "g": g}, {"loss": d_loss, "generator_loss": g_loss}

    return step
