"""A sweep over 32 learning rates with three seeds each, trained as a population in one program.

Every member of the population is a small MNIST classifier with its own learning rate and seed. One
program trains all of them, and the plot shows the loss against the learning rate.

    python examples/sweep.py            # 32 rates × 3 seeds, about a minute on two CPU cores
    python examples/sweep.py --quick    # 8 rates × 2 seeds, a few seconds
"""

# %% Options
from _example import arguments

args = arguments(__doc__, quick="8 rates, 2 seeds, 60 steps", rates=32, seeds=3, batch_size=64)

import functrain as ft
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

# %% Data. Every member sees the same batches
rates, seeds, examples = (8, 2, 3_840) if args.quick else (args.rates, args.seeds, 38_400)
with np.load(args.data / "mnist.npz") as file:
    images = file["x_train"].reshape(-1, 784)
    labels = file["y_train"].astype(np.int32)
train = ft.ArrayLoader((images[:examples], labels[:examples]), args.batch_size, seed=args.seed)
held_out = ft.ArrayLoader((images[-5_000:], labels[-5_000:]), 1_000)


# %% The model. An `ft.Model` is a pair of functions, `init` and `apply`
def init(key, x):
    a, b = jax.random.split(key)
    return {
        "hidden": jax.random.normal(a, (784, 32)) / 28,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(b, (32, 10)) / 6,
    }, {}


def apply(params, model_state, x, *, rng=None, training=False):
    h = jax.nn.relu(x.astype(jnp.float32) / 255 @ params["hidden"] + params["bias"])
    return ft.ModelOutput(h @ params["out"], model_state)


model = ft.Model(init, apply)
loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)

# %% The population. `optax.inject_hyperparams` makes the learning rate a part of the optimizer
# state, so each member can have its own
tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)


def make_state(key):
    params, model_state = model.init(key, None)
    return ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=key)


grid = np.geomspace(1e-4, 10, rates)
population = ft.population.create(
    make_state,
    jax.random.key(args.seed),
    hyperparameters={"learning_rate": np.repeat(grid, seeds)},
)
print(population)

# %% Training. `ft.population.step` turns the step of one member into a step of all members. With
# `stop_non_finite`, members that diverge stop training
step = ft.population.step(ft.train_step(loss_fn, tx), stop_non_finite=True)
metrics = {"accuracy": ft.metrics.accuracy()}
eval_step = ft.population.step(ft.eval_step(loss_fn, metrics=metrics))
population, history = ft.fit(
    population, step, train, eval_data=held_out, eval_step=eval_step, verbose=2
)

# %% Selection. The state of the best member is an ordinary TrainState
losses = history.epochs["val_loss"][-1].reshape(rates, seeds)
accuracies = history.epochs["val_accuracy"][-1]
best = int(np.nanargmin(losses))
state = ft.population.select(population, losses.ravel(), mode="min")
alone = ft.evaluate(state, ft.eval_step(loss_fn, metrics=metrics), held_out)
stopped = int((~np.asarray(population.active)).sum())
print(f"best: learning rate {np.repeat(grid, seeds)[best]:.4f}, accuracy {alone['accuracy']:.4f}")
print(f"{stopped} of {len(population)} members diverged and were stopped")

# %% Plot. The held-out loss of every member by learning rate, and the training loss of each rate
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
for losses_of_seed in losses.T:
    left.plot(grid, losses_of_seed, ".", color="#b8c4d6")
left.plot(grid, np.nanmedian(losses, axis=1), "-", color="#1f5fa8", label=f"median of {seeds}")
left.axvline(np.repeat(grid, seeds)[best], color="#d1602a", ls=":", label="best")
left.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="held-out loss")
window = np.ones(25) / 25
colors = plt.get_cmap("viridis")(np.linspace(0, 1, rates))
medians = np.median(history.steps["loss"].reshape(-1, rates, seeds), axis=2)
for of_rate, rate, color in zip(medians.T, grid, colors, strict=True):
    if rate < 1:
        right.plot(np.convolve(of_rate, window, "valid"), color=color, lw=1)
right.set(yscale="log", xlabel="step", ylabel="loss, a mean of 25 steps")
right.set_title("rates below 1: small ones dark, large ones bright", fontsize=9)
left.grid(alpha=0.25)
left.legend()
figure.savefig(args.output / "sweep.png", dpi=120)
print(f"wrote {args.output / 'sweep.png'}")
