"""A DCGAN that generates digits: two networks and two optimizers in one fused step.

A training state may be any pytree. Here it is a dict of two TrainStates, and the step calls
`ft.update` twice. `ft.fit`, fusing, hooks and checkpoints work without any change. After every
epoch the script draws 64 digits and saves a checkpoint. If it is started again, it resumes from
that checkpoint.

    python examples/dcgan.py            # 20 epochs: about two hours on two CPU cores
    python examples/dcgan.py --quick    # eight steps, to try it out
"""

# %% Options. `arguments` also selects the JAX backend, so it runs before Keras is imported. The
# benchmarks import the networks and the step of this file, and must not parse these options
if __name__ == "__main__":
    from _example import arguments

    args = arguments(
        __doc__,
        quick="two epochs of four steps of 8 images",
        epochs=20,
        batch_size=64,
        fuse=(16, "steps per program"),
    )

import contextlib
import sys

import bridge
import functrain as ft
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from keras import layers

LATENT = 128


# %% The discriminator. It maps images `[B, 28, 28, 1]` to logits `[B, 1]`, which are high for
# images that it takes for generated ones
def discriminator():
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


# %% The generator. It maps latents `[B, 128]` to images `[B, 28, 28, 1]`
def generator():
    return keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(7 * 7 * 128),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Reshape((7, 7, 128)),
            layers.Conv2DTranspose(128, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2DTranspose(128, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 7, padding="same", activation="sigmoid"),
        ]
    )


# %% The state. It is a dict with a TrainState for each network. The generator's key is the only
# source of randomness in the step
def create(seed=0):
    """Returns the Keras models, the optimizers and the states, as dicts with keys "d" and "g"."""
    keras.utils.set_random_seed(seed)
    nets = {"d": discriminator(), "g": generator()}
    txs = {"d": optax.adam(3e-4, eps=1e-7), "g": optax.adam(4e-4, eps=1e-7)}
    keys = {"d": None, "g": jax.random.key(seed)}
    return nets, txs, {n: bridge.create_state(nets[n], txs[n], rng=keys[n]) for n in nets}


# %% The step. First the discriminator learns to tell generated images (label 1) from real ones
# (label 0), with a little noise added to the labels. Then the generator learns to make images that
# the discriminator takes for real. The discriminator's state is an ordinary argument of the
# generator's loss, so this second update does not change it
def gan_step(nets, txs):
    models = {n: bridge.from_keras(net) for n, net in nets.items()}

    def judge(params, model_state, images, labels, *, rng, training):
        logits, model_state, _ = models["d"].apply(params, model_state, images, training=training)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), ft.Aux(model_state)

    def deceive(params, model_state, latents, d, *, rng, training):
        images, model_state, _ = models["g"].apply(params, model_state, latents, training=training)
        # The generator is rewarded if the discriminator takes its images for real ones (label 0).
        real_labels = jnp.zeros((len(latents), 1))
        loss, _ = judge(d.params, d.model_state, images, real_labels, rng=None, training=training)
        return loss, ft.Aux(model_state)

    def step(states, images):
        d, g = states["d"], states["g"]
        images = images.astype(jnp.float32) / 255
        keys = jax.random.split(jax.random.fold_in(g.rng, g.step), 3)
        latents = jax.random.normal(keys[0], (len(images), LATENT))
        generated = models["g"].apply(g.params, g.model_state, latents, training=True).outputs
        both = jnp.concatenate([generated, images])
        labels = jnp.concatenate([jnp.ones((len(images), 1)), jnp.zeros((len(images), 1))])
        labels = labels + 0.05 * jax.random.uniform(keys[1], labels.shape)
        d, d_loss, _ = ft.update(d, judge, txs["d"], both, labels)
        latents = jax.random.normal(keys[2], (len(images), LATENT))
        g, g_loss, _ = ft.update(g, deceive, txs["g"], latents, d)
        return {"d": d, "g": g}, {"d_loss": d_loss, "g_loss": g_loss, "image": generated[0]}

    return step


# %% Pictures. `digits` draws 64 digits, always from the same latents. `contact_sheet` stacks the
# first row of every epoch's picture
def digits(g, net, seed=0):
    latents = np.random.default_rng(seed).normal(size=(64, LATENT)).astype(np.float32)
    images = ft.predict(g, ft.predict_step(bridge.from_keras(net)), ft.ArrayLoader(latents, 64))
    return images.reshape(8, 8, 28, 28).swapaxes(1, 2).reshape(8 * 28, 8 * 28)


def contact_sheet(folder):
    from matplotlib import image

    rows = [image.imread(path)[:28, :, 0] for path in sorted(folder.glob("epoch_*.png"))]
    image.imsave(folder / "dcgan.png", np.concatenate(rows), cmap="gray", vmin=0, vmax=1)


# %% Training. Two hooks report the losses and save a checkpoint after each epoch. At the end the
# trained values are copied back into the Keras generator, which is saved as an ordinary Keras model
def train(args):
    from matplotlib import image

    with np.load(args.data / "mnist.npz") as file:
        # A GAN needs no test set, so all 70 000 images are used.
        images = np.concatenate([file["x_train"], file["x_test"]])[..., None]
    epochs, batch_size = (2, 8) if args.quick else (args.epochs, args.batch_size)
    images = images[:32] if args.quick else images
    loader = ft.ArrayLoader(images, batch_size, shuffle=True, seed=args.seed)

    nets, txs, states = create(args.seed)
    checkpoint = args.output / "checkpoint"
    with contextlib.suppress(FileNotFoundError):
        states = ft.load(checkpoint, like=states)
    start = ft.Position.from_step(step=int(states["d"].step), steps_per_epoch=len(loader))
    # Checkpoints are saved after whole epochs only, so a partial epoch means that the number of
    # steps in an epoch has changed.
    if start.batch:
        sys.exit(
            f"{checkpoint} was saved at step {start.step}, which is not a multiple of the "
            f"{len(loader)} steps in an epoch: "
            "use the --batch-size of that run, or another --output"
        )
    if start.epoch:
        print(f"resuming after epoch {start.epoch}, from {checkpoint}")
    if start.epoch >= epochs:
        print(f"nothing left to do: delete {checkpoint} to start again, or raise --epochs")
        return

    @ft.every(steps=4 if args.quick else 200)
    def report(event):
        losses = event.latest()
        print(f"step {event.step}: d {losses['d_loss']:.4f}, g {losses['g_loss']:.4f}", flush=True)

    @ft.every(epochs=1)
    def keep(event):
        path = args.output / f"epoch_{event.epoch + 1:03}.png"
        image.imsave(path, digits(event.state["g"], nets["g"]), cmap="gray", vmin=0, vmax=1)
        contact_sheet(args.output)
        ft.save(checkpoint, event.state, overwrite=True)
        print(f"epoch {event.epoch + 1}: wrote {path} and {checkpoint}", flush=True)

    states, _ = ft.fit(
        states,
        gan_step(nets, txs),
        loader,
        epochs=epochs,
        start=start,
        fuse=args.fuse,
        hooks=[report, keep],
    )

    bridge.to_keras(states["g"], nets["g"]).save(args.output / "generator.keras")
    print(f"wrote {args.output / 'generator.keras'} and {args.output / 'dcgan.png'}")


if __name__ == "__main__":
    train(args)
