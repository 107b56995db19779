"""A diffusion model that draws digits, with an average of the weights and samples on the way.

The network learns to remove noise from digits. A digit is drawn by removing the noise from random
numbers in small steps. Noise levels and noise are drawn in the loss, from the key of the step, so a
training is the same whatever the number of steps in a program. Samples are drawn with an
exponential moving average (EMA) of the weights. The model is that of Ho et al., 2020
(https://arxiv.org/abs/2006.11239), with the angles and the target of Salimans and Ho, 2022
(https://arxiv.org/abs/2202.00512), and the sampler of Song et al., 2021
(https://arxiv.org/abs/2010.02502).

    python examples/diffusion.py            # 12 epochs, about half an hour on two CPU cores
    python examples/diffusion.py --quick    # a small network, half a minute
"""

# %% Options
from _example import arguments

args = arguments(
    __doc__,
    quick="a small network, two epochs of 3 200 digits",
    epochs=12,
    batch_size=128,
    width=(32, "channels of the network"),
    sampling_steps=(50, "steps in which a digit is drawn"),
)

import flax.linen as nn
import functrain as ft
import jax
import jax.numpy as jnp
import numpy as np
import optax

epochs, width = (2, 8) if args.quick else (args.epochs, args.width)

# %% Data. The pixels stay bytes; the loss scales them on the device
with np.load(args.data / "mnist.npz") as file:
    images, held_out = file["x_train"][..., None], file["x_test"][..., None]
if args.quick:
    images, held_out = images[:3_200], held_out[:1_000]
train = ft.ArrayLoader(images, args.batch_size, shuffle=True, seed=args.seed)
validation = ft.ArrayLoader(held_out, 500)


# %% The network. It is a U-Net on 14 x 14 and 7 x 7 pixels, which gets the noise level as an angle
class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, level):
        y = nn.Conv(self.width, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))
        y += nn.Dense(self.width)(level)[:, None, None]
        y = nn.Conv(self.width, (3, 3), kernel_init=nn.initializers.zeros)(
            nn.swish(nn.GroupNorm(8)(y))
        )
        return y + (x if x.shape == y.shape else nn.Dense(self.width)(x))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        x, angle = inputs
        waves = angle[:, None] * 2.0 ** jnp.arange(8)
        level = nn.swish(nn.Dense(4 * width)(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], 1)))
        fine = Block(width)(nn.Conv(width, (4, 4), strides=2)(x), level)
        coarse = Block(2 * width)(nn.Conv(2 * width, (2, 2), strides=2)(fine), level)
        tokens = nn.GroupNorm(8)(coarse).reshape(len(x), 49, -1)
        coarse += nn.MultiHeadDotProductAttention(4)(tokens).reshape(coarse.shape)
        coarse = Block(2 * width)(coarse, level)
        up = nn.ConvTranspose(width, (2, 2), strides=(2, 2))(coarse)
        fine = Block(width)(jnp.concatenate([fine, up], -1), level)
        return nn.ConvTranspose(1, (4, 4), strides=(2, 2))(nn.swish(nn.GroupNorm(8)(fine)))


model = ft.from_linen(UNet())


# %% The loss. A noisy image is cos(angle) * image + sin(angle) * noise, and the network predicts
# cos(angle) * noise - sin(angle) * image, from which follow both. Evaluation uses fixed noise
def loss_fn(params, model_state, images, *, rng, training):
    x = images.astype(jnp.float32) / 127.5 - 1
    angle_key, noise_key = jax.random.split(rng)
    angle = jax.random.uniform(angle_key, (len(x),), maxval=jnp.pi / 2)
    noise = jax.random.normal(noise_key, x.shape)
    cos, sin = jnp.cos(angle)[:, None, None, None], jnp.sin(angle)[:, None, None, None]
    predicted = model.apply(params, model_state, (cos * x + sin * noise, angle)).outputs
    return jnp.mean((predicted - (cos * noise - sin * x)) ** 2), ft.Aux(model_state)


# %% Sampling. It begins with noise, and in each step estimates image and noise, and combines them
# anew at the next lower noise level
@jax.jit
def sample(params, key):
    angles = jnp.linspace(jnp.pi / 2, 0.0, args.sampling_steps + 1)

    def denoise(x, angle_pair):
        angle, next_angle = angle_pair
        predicted = model.apply(params, {}, (x, jnp.full(len(x), angle))).outputs
        image = jnp.clip(jnp.cos(angle) * x - jnp.sin(angle) * predicted, -1.0, 1.0)
        noise = (x - jnp.cos(angle) * image) / jnp.sin(angle)
        return jnp.cos(next_angle) * image + jnp.sin(next_angle) * noise, None

    noise = jax.random.normal(key, (80, 28, 28, 1))
    x, _ = jax.lax.scan(denoise, noise, (angles[:-1], angles[1:]))
    return (x + 1) / 2


# %% Training. `Sample` draws the same digits at each epoch, with the averaged weights
init_key, train_key, sample_key = jax.random.split(jax.random.key(args.seed), 3)
params, _ = model.init(init_key, (jnp.zeros((1, 28, 28, 1)), jnp.zeros(1)))
rate = optax.cosine_onecycle_schedule(epochs * len(train), 2e-3)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate), ft.tx.ema(0.995))
state, history = ft.fit(
    ft.TrainState.create(params=params, tx=tx, rng=train_key),
    ft.train_step(loss_fn, tx),
    train,
    epochs=epochs,
    eval_data=validation,
    eval_step=ft.eval_step(
        loss_fn,
        rng=jax.random.key(args.seed),
        get_state=ft.tx.averaged,
    ),
    hooks=[
        ft.hooks.Sample(
            lambda s: sample(ft.tx.ema_params(s), sample_key),
            directory=args.output,
            name="diffusion",
        )
    ],
)
first, *_, last = history.epochs["val_loss"]
print(f"validation loss {last:.4f}, {first:.4f} after the first epoch")
