"""A variational autoencoder with a loss of two terms, both logged, and averaged weights.

The loss is one function that returns the sum of its two terms, and each term under a name.
`train_step` logs the terms. `eval_step(logs=...)` averages them over the held-out examples, and
evaluates with an exponential moving average (EMA) of the weights.

    python examples/vae.py            # ten epochs, a few minutes on two CPU cores
    python examples/vae.py --quick    # a few seconds
"""

# %% Options
from _example import arguments

args = arguments(__doc__, quick="two epochs of 3 200 digits", epochs=10, batch_size=64, latents=20)

import flax.linen as nn
import functrain as ft
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib import image

# %% Data. The pixels stay bytes; the loss scales them on the device
with np.load(args.data / "mnist.npz") as file:
    images, held_out = file["x_train"], file["x_test"]
if args.quick:
    images, held_out = images[:3_200], held_out[:1_000]
train = ft.ArrayLoader(images, args.batch_size, shuffle=True, seed=args.seed)
validation = ft.ArrayLoader(held_out, 250)


# %% The model. The encoder returns the means and log variances of the latents, and the decoder the
# logits of the pixels
class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(500)(x.reshape(len(x), -1)))
        return nn.Dense(args.latents)(x), nn.Dense(args.latents)(x)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, z):
        return nn.Dense(28 * 28)(nn.relu(nn.Dense(500)(z))).reshape(-1, 28, 28)


encoder, decoder = ft.from_linen(Encoder()), ft.from_linen(Decoder())


# %% The loss. `rec` is the cross-entropy of the reconstruction, and `kl` is the divergence of the
# latents from a standard normal distribution. Latents are sampled in training only; evaluation uses
# their means
def loss_fn(params, model_state, images, *, rng, training):
    x = images.astype(jnp.float32) / 255
    mean, log_variance = encoder.apply(params["encoder"], {}, x).outputs
    z = mean
    if training:
        z += jnp.exp(log_variance / 2) * jax.random.normal(rng, mean.shape)
    logits = decoder.apply(params["decoder"], {}, z).outputs
    rec = optax.sigmoid_binary_cross_entropy(logits, x).sum((1, 2)).mean()
    kl = (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(1).mean() / 2
    return rec + kl, ft.Aux(model_state, logits, {"rec": rec, "kl": kl})


# %% Training. The optimizer logs the norm of the gradient, skips updates that are not finite, and
# keeps the average of the weights. `get_state` selects that average for evaluation
keys = jax.random.split(jax.random.key(args.seed), 3)
params = {
    "encoder": encoder.init(keys[0], jnp.zeros((1, 28, 28)))[0],
    "decoder": decoder.init(keys[1], jnp.zeros((1, args.latents)))[0],
}
tx = ft.tx.skip_non_finite(
    optax.chain(ft.tx.log_norm(), optax.adam(1e-3), ft.tx.ema(0.99, debias=True))
)
state = ft.TrainState.create(params=params, tx=tx, rng=keys[2])
state, history = ft.fit(
    state,
    ft.train_step(loss_fn, tx),
    train,
    epochs=2 if args.quick else args.epochs,
    eval_data=validation,
    eval_step=ft.eval_step(loss_fn, logs=("rec", "kl"), get_state=ft.tx.averaged),
)
for name in ("rec", "kl"):
    first, *_, last = history.epochs[f"val_{name}"]
    print(f"{name}: validation {last:.2f} nats an image, {first:.2f} after the first epoch")

# %% Pictures. The first row has held-out digits, the second one their reconstructions, and the
# others digits that are decoded from random latents
averaged, originals = ft.tx.ema_params(state), held_out[:16].astype(np.float32) / 255


def decode(z):
    return jax.nn.sigmoid(decoder.apply(averaged["decoder"], {}, z).outputs)


reconstructions = decode(encoder.apply(averaged["encoder"], {}, originals).outputs[0])
samples = decode(jax.random.normal(jax.random.key(args.seed), (64, args.latents)))
sheet = np.concatenate([originals, reconstructions, samples]).reshape(-1, 16, 28, 28)
sheet = np.pad(sheet.swapaxes(1, 2).reshape(-1, 28, 16 * 28), ((0, 0), (2, 2), (0, 0)))
image.imsave(args.output / "vae.png", sheet.reshape(-1, 16 * 28), cmap="gray", vmin=0, vmax=1)
print(f"wrote {args.output / 'vae.png'}")
