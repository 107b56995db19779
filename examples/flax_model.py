"""Flax modules, linen and nnx, trained by the same loop as a Keras model.

The script defines a small convolutional network with BatchNorm and dropout twice, in linen and in
nnx. Each is converted to a pair of pure functions, `init` and `apply`, and the training code is
the same for both.

    python examples/flax_model.py            # two epochs each, a few minutes on two CPU cores
    python examples/flax_model.py --quick    # a few seconds
"""

# %% Options. This example uses no Keras model and does not import Keras
from _example import arguments

args = arguments(__doc__, quick="an epoch of 1 600 digits each", epochs=2, batch_size=64)

import flax.linen as nn
import functrain as ft
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from flax import nnx

# %% Data. The pixels stay bytes; the models scale them on the device
with np.load(args.data / "mnist.npz") as file:
    x, y = file["x_train"][..., None], file["y_train"].astype(np.int32)
    test = file["x_test"][..., None], file["y_test"].astype(np.int32)

if args.quick:
    x, y, test = x[:1_600], y[:1_600], tuple(part[:1_000] for part in test)
train = ft.ArrayLoader((x, y), args.batch_size, shuffle=True, seed=args.seed)
validation = ft.ArrayLoader(test, 500)


# %% A linen module. It only describes the computation, and its values are stored outside of it.
# `ft.from_linen` passes `training` on as the module's `train` argument
class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = x.astype(jnp.float32) / 255
        for width in (16, 32):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


linen = ft.from_linen(LinenNet())
key = jax.random.key(args.seed)
params, model_state = linen.init(key, x[:1])


# %% An nnx module. It contains its values. Training works on copies and never changes the module
class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.convs, self.norms = nnx.List(), nnx.List()
        for before, width in ((1, 16), (16, 32)):
            conv = nnx.Conv(before, width, (3, 3), strides=2, use_bias=False, rngs=rngs)
            self.convs.append(conv)
            self.norms.append(nnx.BatchNorm(width, rngs=rngs))
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(7 * 7 * 32, 10, rngs=rngs)

    def __call__(self, x):
        x = x.astype(jnp.float32) / 255
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.out(self.drop(x.reshape(len(x), -1)))


nnx_model = ft.from_nnx(NnxNet(nnx.Rngs(args.seed)))
nnx_params, nnx_state = nnx_model.init(key, x[:1])

# %% The optimizer and the initial values of both models
tx = optax.adamw(2e-3)
starts = {
    "linen": (linen, params, model_state),
    "nnx": (nnx_model, nnx_params, nnx_state),
}

# %% Training. The same code trains both models. The `rng` of the state is the key for dropout
histories = {}
for name, (model, params, model_state) in starts.items():
    state = ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=key)
    print(f"{name}: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")
    loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)
    metrics = {"accuracy": ft.metrics.accuracy()}
    state, history = ft.fit(
        state,
        ft.train_step(loss_fn, tx, metrics=metrics),
        train,
        epochs=1 if args.quick else args.epochs,
        eval_data=validation,
        eval_step=ft.eval_step(loss_fn, metrics=metrics),
    )
    histories[name] = history
    print(f"{name}: validation accuracy {history.epochs['val_accuracy'][-1]:.4f}")

# %% Back to nnx. `nnx.update` copies the trained values into a module
trained = NnxNet(nnx.Rngs(args.seed))
nnx.update(trained, state.params)
nnx.update(trained, state.model_state)
trained.eval()
agree = np.mean(np.argmax(trained(test[0][:500]), -1) == test[1][:500])
print(f"the nnx module itself: accuracy {agree:.4f} on the first 500")

# %% Plot. The smoothed training loss and the validation loss of both models
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
for name, history in histories.items():
    loss = history.steps["loss"]
    smooth = np.convolve(loss, np.ones(20) / 20, mode="valid")
    (line,) = panel.plot(np.arange(20, len(loss) + 1), smooth, lw=1, label=f"{name}, training")
    ends = np.linspace(0, len(loss), len(history.epochs["val_loss"]) + 1)[1:]
    panel.plot(
        ends, history.epochs["val_loss"], "s", color=line.get_color(), label=f"{name}, validation"
    )
panel.set(xlabel="step", ylabel="loss", yscale="log")
panel.legend()
figure.savefig(args.output / "flax_model.png", dpi=120)
print(f"wrote {args.output / 'flax_model.png'}")
