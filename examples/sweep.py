"""A sweep in one program: 32 learning rates, each with some seeds, as one population.

Every member is a small MNIST classifier with a learning rate and a seed of its own. One program
trains them all; the picture shows loss against learning rate.

    python examples/sweep.py            # 32 rates × 3 seeds, about a minute on two CPU cores
    python examples/sweep.py --quick    # 8 rates × 2 seeds, a few seconds
"""

# %% Arguments
from _example import arguments

args = arguments(__doc__, quick="8 rates, 2 seeds, 60 steps", rates=32, seeds=3, batch_size=64)

import functrain as ft
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

# %% The data: every member sees the same batches
rates, seeds, examples = (8, 2, 3_840) if args.quick else (args.rates, args.seeds, 38_400)
with np.load(args.data / "mnist.npz") as file:
    images = file["x_train"].reshape(-1, 784)
    labels = file["y_train"].astype(np.int32)
train = ft.ArrayLoader((images[:examples], labels[:examples]), args.batch_size, seed=args.seed)
held_out = ft.ArrayLoader((images[-5_000:], labels[-5_000:]), 1_000)


# %% One model: two functions
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

# %% inject_hyperparams makes the rate a part of the state, so that each member has its own
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

# %% Training: the step of one, taken by all. Members that diverge are stopped where they are
step = ft.population.step(ft.train_step(loss_fn, tx), stop_non_finite=True)
metrics = {"accuracy": ft.metrics.accuracy()}
eval_step = ft.population.step(ft.eval_step(loss_fn, metrics=metrics))
population, history = ft.fit(
    population, step, train, eval_data=held_out, eval_step=eval_step, verbose=2
)

# %% What came of it: the best member is a state like any other
losses = history.epochs["val_loss"][-1].reshape(rates, seeds)
accuracies = history.epochs["val_accuracy"][-1]
best = int(np.nanargmin(losses))
state = ft.population.select(population, losses.ravel(), mode="min")
alone = ft.evaluate(state, ft.eval_step(loss_fn, metrics=metrics), held_out)
stopped = int((~np.asarray(population.active)).sum())
print(f"best: learning rate {np.repeat(grid, seeds)[best]:.4f}, accuracy {alone['accuracy']:.4f}")
print(f"{stopped} of {len(population)} members diverged and were stopped")

# %% The picture
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
