"""A deep ensemble: ten networks, trained in one program, predict better together than alone.

Ten small MNIST classifiers are trained on few examples, as one population. They differ only in
their random keys. The mean of their probabilities is compared with single members by two measures:
the negative log-likelihood (NLL), and the expected calibration error (ECE), which is the gap
between confidence and accuracy (Lakshminarayanan et al., 2017, https://arxiv.org/abs/1612.01474).

    python examples/ensemble.py            # ten members, half a minute on two CPU cores
    python examples/ensemble.py --quick    # four members, a few seconds
"""

# %% Options
from _example import arguments

args = arguments(
    __doc__, quick="four members, 3 epochs", members=10, epochs=30, examples=2_000, bins=15
)

import flax.linen as nn
import functrain as ft
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

# %% Data. With few training examples the networks are overconfident, so calibration matters
members, epochs = (4, 3) if args.quick else (args.members, args.epochs)
with np.load(args.data / "mnist.npz") as file:
    images = (file["x_train"].reshape(-1, 784) / 255).astype(np.float32)
    labels = file["y_train"].astype(np.int32)
train = ft.ArrayLoader((images[: args.examples], labels[: args.examples]), 50, shuffle=True)
x, y = images[-10_000:], labels[-10_000:]


# %% The model. `make_state` returns the state of one member, initialized from its random key
class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


model, tx = ft.from_linen(Network()), optax.adam(3e-3)
loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)


def make_state(key):
    params, model_state = model.init(key, x[:1])
    return ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=key)


# %% Training. One program takes the step of all members
population = ft.population.create(make_state, jax.random.key(args.seed), members=members)
step = ft.population.step(ft.train_step(loss_fn, tx))
population, history = ft.fit(population, step, train, epochs=epochs, verbose=0)

# %% Predictions. `each` has the probabilities of every member, `[examples, members, classes]`
each_step = ft.population.predict_step(
    ft.predict_step(model), combine=lambda logits: jax.nn.softmax(logits).swapaxes(0, 1)
)
each = ft.predict(population, each_step, ft.ArrayLoader(x, 1_000))


def nll(probabilities: np.ndarray) -> float:
    """The mean negative log-likelihood."""
    return float(-np.log(np.maximum(probabilities[np.arange(len(y)), y], 1e-12)).mean())


def reliability(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean confidence, accuracy and share of examples in each bin of confidence."""
    confidence, right = probabilities.max(1), probabilities.argmax(1) == y
    bins = np.minimum((confidence * args.bins).astype(int), args.bins - 1)
    count = np.bincount(bins, minlength=args.bins)
    there = np.maximum(count, 1)
    means = (np.bincount(bins, values, args.bins) / there for values in (confidence, right))
    return *means, count / len(y)


def ece(probabilities: np.ndarray) -> float:
    """The expected calibration error: how far confidence and accuracy are apart."""
    confidence, accuracy, share = reliability(probabilities)
    return float((np.abs(confidence - accuracy) * share).sum())


# %% Evaluation. `together[n - 1]` is the ensemble of the first n members, and `alone` has each
# single member
together = [each[:, :n].mean(1) for n in range(1, members + 1)]
alone = [each[:, i] for i in range(members)]
for name, measure in (("nll", nll), ("ece", ece)):
    singles = [measure(p) for p in alone]
    print(f"{name}: single {np.mean(singles):.4f}, ensemble {measure(together[-1]):.4f}")
accuracy = [float((p.argmax(1) == y).mean()) for p in (*alone, together[-1])]
print(f"accuracy: single {np.mean(accuracy[:-1]):.4f}, ensemble {accuracy[-1]:.4f}")

# %% Plot. NLL and ECE by the size of the ensemble, and accuracy by confidence
figure, panels = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
sizes = np.arange(1, members + 1)
for panel, (name, measure) in zip(panels, (("nll", nll), ("ece", ece)), strict=False):
    for p in alone:
        panel.axhline(measure(p), color="#b8c4d6", lw=0.8)
    panel.plot(sizes, [measure(p) for p in together], "-o", color="#1f5fa8", ms=4)
    panel.set(xlabel="members in the ensemble", title=f"{name.upper()}, single members grey")
confidence, right, share = reliability(together[-1])
panels[2].plot([0, 1], [0, 1], color="#b8c4d6")
panels[2].plot(confidence[share > 0], right[share > 0], "-o", color="#1f5fa8", ms=4, label="all")
confidence, right, share = reliability(alone[0])
panels[2].plot(confidence[share > 0], right[share > 0], "--s", color="#d1602a", ms=4, label="one")
panels[2].set(xlabel="confidence", ylabel="accuracy", title="reliability")
panels[2].legend()
figure.savefig(args.output / "ensemble.png", dpi=120)
print(f"wrote {args.output / 'ensemble.png'}")
