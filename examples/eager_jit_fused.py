"""One training step, run eager, jitted and fused, with the times and the results of each.

The step is a pure function of arrays, and it is the same in all three cases. It is called directly,
compiled by `jax.jit`, or compiled by `ft.fuse` into a program that takes 128 steps.

    python examples/eager_jit_fused.py            # about a minute on two CPU cores, mostly eager
    python examples/eager_jit_fused.py --quick    # 100 steps in each epoch
"""

# %% Options. `arguments` also selects the JAX backend, so it runs before Keras is imported
from _example import arguments

args = arguments(
    __doc__, quick="100 steps an epoch", epochs=2, batch_size=64, fuse=(128, "steps per program")
)

import time

import bridge
import functrain as ft
import jax
import keras
import matplotlib.figure
import numpy as np
import optax

# %% Data. 10 000 training images, chosen at random, are held out for validation
with np.load(args.data / "mnist.npz") as file:
    x = file["x_train"].reshape(-1, 784).astype(np.float32) / 255
    y = file["y_train"].astype(np.int32)

order = np.random.default_rng(args.seed).permutation(len(x))
drawn, rest = order[:10_000], order[10_000 : 16_400 if args.quick else None]
train = ft.ArrayLoader((x[rest], y[rest]), args.batch_size, shuffle=True, seed=args.seed)
validation = ft.ArrayLoader((x[drawn], y[drawn]), 1_000)


# %% The model. One of its layers adds a loss, 0.1 times its mean activation
class Calm(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(inputs))
        return inputs


keras.utils.set_random_seed(args.seed)
keras_model = keras.Sequential(
    [
        keras.Input((784,)),
        keras.layers.Dense(64, activation="relu"),
        Calm(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)

# %% The step. `ft.train_step` builds a pure function that computes the gradient, applies the
# optimizer and updates the metrics
tx = optax.sgd(0.1)
loss_fn = ft.supervised(
    bridge.from_keras(keras_model), optax.softmax_cross_entropy_with_integer_labels
)
metrics = {"accuracy": ft.metrics.accuracy()}
step = ft.train_step(loss_fn, tx, metrics=metrics)
eval_step = ft.eval_step(loss_fn, metrics=metrics)
start = bridge.create_state(keras_model, tx)


# %% Eager and jitted. Both are a plain loop over batches. `take` is either the step or the compiled
# step
def single_steps(take):
    def epoch(state, number):
        metered = step.start(state)
        for i, batch in enumerate(train.epoch(number), 1):
            metered, logs = take(metered, batch)
            if i % 200 == 0:
                print(f"  {i * args.batch_size} samples seen: loss {logs['loss']:.4f}")
        return metered

    return epoch


# %% Fused. This is the same loop over chunks, which stack K batches to arrays `[K, B, ...]`. It is
# written out here to show how it works. `ft.run` plans the chunks for you, and `ft.fit` is a short
# function that calls `ft.run`
def fused_steps(k):
    fused, one = ft.fuse(step, k), ft.fuse(step, 1)

    def epoch(state, number):
        metered = step.start(jax.tree.map(jax.numpy.copy, state))  # a fused step consumes it
        whole = full_batches // k * k
        for i in range(0, whole, k):
            metered, logs = fused(metered, train.chunk(number, i, k))
            print(f"  {(i + k) * args.batch_size} samples seen: loss {logs['loss'][-1]:.4f}")
        for batch in train.epoch(number, whole):  # what is left, the smaller last batch included
            metered, _ = one(metered, jax.tree.map(lambda leaf: leaf[None], batch))
        return metered

    return epoch


full_batches = train.examples // args.batch_size
k = min(args.fuse, full_batches)
ways = {
    "eager": single_steps(step),
    "jitted": single_steps(jax.jit(step)),
    "fused": fused_steps(k),
}

# %% Training. The three ways train the same model on the same batches
table, trained, accuracies = {}, {}, {}
for name, epoch in ways.items():
    state, seconds, accuracies[name] = start, [], []
    for number in range(args.epochs):
        print(f"{name}, epoch {number + 1}")
        begin = time.perf_counter()
        metered = jax.block_until_ready(epoch(state, number))
        seconds.append(time.perf_counter() - begin)
        state = metered.state
        accuracy = float(step.metrics.compute(metered.metrics)["accuracy"])
        held_out = ft.evaluate(state, eval_step, validation)["accuracy"]
        accuracies[name].append((accuracy, held_out))
        print(f"  accuracy {accuracy:.4f}, validation {held_out:.4f}, {seconds[-1]:.2f} s")
    table[name], trained[name] = seconds, state

# %% The times. The first epoch of the jitted and the fused loop includes compilation. The last
# epoch does not
print(f"\n{'':8}{'first epoch':>14}{'last epoch':>14}{'a step':>12}{'':>10}")
speed = {name: table["eager"][-1] / seconds[-1] for name, seconds in table.items()}
for name, seconds in table.items():
    each = 1e3 * seconds[-1] / len(train)
    print(f"{name:8}{seconds[0]:>12.2f} s{seconds[-1]:>12.2f} s{each:>9.3f} ms{speed[name]:>9.1f}x")

# %% The results. Jitted and fused training agree to the bit. Eager execution rounds differently,
# because the compiler merges operations, and the differences grow from step to step
params = {name: jax.tree.leaves(state.params) for name, state in trained.items()}
for a, b in zip(params["jitted"], params["fused"], strict=True):
    np.testing.assert_array_equal(a, b)
apart = max(
    float(np.abs(a - b).max()) for a, b in zip(params["eager"], params["jitted"], strict=True)
)
print(f"jitted and fused: equal to the bit; eager within {apart:.1e} of them")

# %% Exhausted iterators. Training on an iterator that has no batches left would do nothing, so
# `ft.run` raises an error
spent = train.epoch(0)
for _ in spent:
    pass
try:
    next(ft.run(start, step, spent))
except ValueError as error:
    print(f"an exhausted iterator is refused: {str(error).split(':')[1].split('.')[0].strip()}")

# %% Plot. The time of a step, and the accuracy after each epoch, for each of the three ways
figure = matplotlib.figure.Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
bars = left.bar(table.keys(), [1e3 * seconds[-1] / len(train) for seconds in table.values()])
left.bar_label(bars, [f"{ratio:.1f}x" for ratio in speed.values()])
left.margins(y=0.15)  # room for the labels
left.set(yscale="log", ylabel="ms a step")
for name, style in (("eager", "o-"), ("jitted", "x--"), ("fused", "+:")):
    right.plot(
        range(1, args.epochs + 1), accuracies[name], style, label=(name, f"{name}, held out")
    )
right.set(xlabel="epoch", ylabel="accuracy", xticks=range(1, args.epochs + 1))
right.legend(fontsize=8)
figure.savefig(args.output / "eager_jit_fused.png", dpi=120)
print(f"wrote {args.output / 'eager_jit_fused.png'}")
