"""Eight low-rank adapters for eight tasks over one frozen base, trained as a population.

A classifier learns MNIST. Then the digits are mirrored, turned, inverted or cut up, which it does
not recognize any more. For each of these eight tasks an adapter (LoRA, Hu et al., 2021) learns from
few images, all in one program, which stores the classifier once. For comparison, eight copies of
the classifier are trained with all of their params.

    python examples/lora.py            # about two minutes on two CPU cores
    python examples/lora.py --quick    # some seconds
"""

# %% Options
from _example import arguments

args = arguments(__doc__, quick="fewer images and epochs", rank=8, images=2_000, epochs=10)

import flax.linen as nn
import functrain as ft
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

# %% Data. A task is a change of the images
with np.load(args.data / "mnist.npz") as file:
    images, labels = file["x_train"], file["y_train"].astype(np.int32)
    test_images, test_labels = file["x_test"][:2_000], file["y_test"][:2_000].astype(np.int32)
TASKS = {
    "mirrored": lambda x: x[:, :, ::-1],
    "upside down": lambda x: x[:, ::-1],
    "turned by 90°": lambda x: np.rot90(x, axes=(1, 2)),
    "turned by 180°": lambda x: x[:, ::-1, ::-1],
    "inverted": lambda x: 255 - x,
    "halves swapped": lambda x: np.roll(x, 14, axis=2),
    "quarters swapped": lambda x: np.roll(x, (14, 14), axis=(1, 2)),
    "rows shuffled": lambda x: x[:, np.random.default_rng(0).permutation(28)],
}


def flat(x):
    return x.reshape(-1, 784).astype(np.float32) / 255


# %% The base, trained on plain digits
class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.relu(nn.Dense(256, name=f"hidden_{i}")(x))
        return nn.Dense(10, name="head")(x)


def create(model, tx, key):
    params, model_state = model.init(key, flat(images[:1]))
    return ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=key)


cross_entropy = optax.softmax_cross_entropy_with_integer_labels
metrics = {"accuracy": ft.metrics.accuracy()}
model, tx = ft.from_linen(Classifier()), optax.adam(1e-3)
plain = slice(6_400 if args.quick else 51_200)
base, _ = ft.fit(
    create(model, tx, jax.random.key(args.seed)),
    ft.train_step(ft.supervised(model, cross_entropy), tx, metrics=metrics),
    ft.ArrayLoader((flat(images[plain]), labels[plain]), 64, shuffle=True),
    epochs=2 if args.quick else 5,
    verbose=2,
)

# %% The tasks. Each has images of its own, which the base has not seen, and its own test images
count, epochs = (512, 4) if args.quick else (args.images, args.epochs)
rest = slice(-count, None)
train = ft.population.Loader(
    [
        ft.ArrayLoader((flat(change(images[rest])), labels[rest]), 64, shuffle=True, seed=i)
        for i, change in enumerate(TASKS.values())
    ]
)
test = ft.population.Loader(
    [ft.ArrayLoader((flat(change(test_images)), test_labels), 500) for change in TASKS.values()]
)


def train_members(model, learning_rate, **shared):
    """Trains eight members, one for each task, and returns them with their test accuracies."""
    tx = optax.adam(learning_rate)
    loss_fn = ft.supervised(model, cross_entropy)
    population = ft.population.create(
        lambda key: create(model, tx, key), jax.random.key(args.seed), members=len(TASKS), **shared
    )
    step = ft.population.step(ft.train_step(loss_fn, tx, metrics=metrics), data="per_member")
    eval_step = ft.population.step(ft.eval_step(loss_fn, metrics=metrics), data="per_member")
    before = ft.evaluate(population, eval_step, test)["accuracy"]
    population, _ = ft.fit(population, step, train, epochs=epochs, verbose=2)
    return population, before, ft.evaluate(population, eval_step, test)["accuracy"]


# %% Adapters. All members share the base, `model_state/frozen`. Adapters take larger learning rates
pretrained = ft.Model(lambda key, x: (base.params, base.model_state), model.apply)
adapted = ft.lora(pretrained, "**/kernel", rank=args.rank, factored=True)
adapters, before, with_adapters = train_members(adapted, 5e-3, shared="model_state/frozen/**")
print(adapters)

# %% For comparison: eight copies, all of whose params are trained
copies, _, with_all = train_members(pretrained, 1e-3)
print(copies)


# %% Results
def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree)) / 2**20


print(f"{'task':18}   base  adapter  all params")
for task, *accuracies in zip(TASKS, before, with_adapters, with_all, strict=True):
    print("{:18} {:6.3f} {:8.3f} {:11.3f}".format(task, *accuracies))
means = [np.mean(x) for x in (before, with_adapters, with_all)]
print("{:18} {:6.3f} {:8.3f} {:11.3f}".format("mean", *means))
print(f"states: {size(adapters):.1f} MiB with adapters, {size(copies):.1f} MiB with all params")

# %% A file of all adapters, and the classifier of one task: the base with its adapter added
ft.save(args.output / "adapters", adapters.states.params, overwrite=True)
file_size = size(adapters.states.params)
print(f"a file of eight adapters: {file_size:.2f} MiB; base: {size(base.params):.2f} MiB")
merged = ft.merge_frozen(adapters[3])
logits = Classifier().apply({"params": merged.params}, flat(TASKS["turned by 180°"](test_images)))
accuracy = np.mean(np.argmax(logits, -1) == test_labels)
print(f"flax, with the adapter for turned digits added: accuracy {accuracy:.3f}")

# %% Plot
figure, axes = plt.subplots(figsize=(9, 3.8), layout="constrained")
bars = {"base": before, f"adapter of rank {args.rank}": with_adapters, "all params": with_all}
colors = ["#b8c4d6", "#1f5fa8", "#d1602a"]
for i, ((name, accuracies), color) in enumerate(zip(bars.items(), colors, strict=True)):
    axes.bar(np.arange(len(TASKS)) + 0.27 * (i - 1), accuracies, 0.25, label=name, color=color)
axes.set_xticks(range(len(TASKS)), TASKS, rotation=20, ha="right", fontsize=9)
axes.set(ylabel=f"test accuracy, {count:,} training images", ylim=(0, 1))
axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.15), frameon=False)
axes.grid(axis="y", alpha=0.25)
figure.savefig(args.output / "lora.png", dpi=120)
print(f"wrote {args.output / 'lora.png'}")
